"""The container format of GGUF: header, metadata, tensor table.

The `gguf` package reads it too, but makes a numpy array of every string of the vocabulary, which takes
seconds; this takes a tenth of one (docs/decisions/003-gguf-header.md). Quantized blocks are decoded by the
package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.core.errors import ModelLoadError

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: GGUF's name.
        shape: in torch's order, the last dimension contiguous.
        type_id: GGML's number of the quantization.
        offset: bytes from the start of the data section.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        metadata: key → value, arrays as lists.
        tensors: name → where it lies.

    Raises:
        ModelLoadError: the file is missing, is not GGUF, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read ({error})") from error
        self._position = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelLoadError(
                f"{path}: broken or cut off near byte {self._position} of {len(self._data)} ({error})"
            ) from error

    def raw(self, info: TensorInfo, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor; ModelLoadError if the file ends before."""
        start = self._data_start + info.offset
        if start + num_bytes > len(self._data):
            raise ModelLoadError(
                f"{self.path}: cut off; {info.name} needs bytes {start} to {start + num_bytes}, "
                f"the file has {len(self._data)}"
            )
        return np.frombuffer(self._data, dtype=np.uint8, count=num_bytes, offset=start)

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path}: is not a GGUF file (it starts with {self._data[:4]!r})")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        for _ in range(num_tensors):
            name = self._string()
            num_dimensions = self._scalar("I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise ModelLoadError(f"{self.path}: {name} claims {num_dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
            self.tensors[name] = TensorInfo(name, shape, self._scalar("I"), self._scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{self.path}: general.alignment must be a positive integer, got {alignment!r}")
        self._data_start = -(-self._position // alignment) * alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        return self._bytes(length).decode("utf-8")

    def _bytes(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise struct.error(f"{length} bytes wanted, {len(self._data) - self._position} left")
        value = self._data[self._position : end]
        self._position = end
        return value

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            if element in _SCALARS:
                code = f"<{count}{_SCALARS[element]}"
                return list(struct.unpack(code, self._bytes(struct.calcsize(code))))
            if element == _STRING:
                return self._strings(count)
            return [self._value(element) for _ in range(count)]
        raise ModelLoadError(f"{self.path}: unknown kind of metadata {kind} near byte {self._position}")

    def _strings(self, count: int) -> list[str]:
        # A vocabulary is read here: 50,000 and more strings, so without a call per string.
        unpack, data, position = struct.Struct("<Q").unpack_from, self._data, self._position
        strings = []
        for _ in range(count):
            (length,) = unpack(data, position)
            start = position + 8
            position = start + length
            if position > len(data):
                raise struct.error(f"a string of {length} bytes is wanted")
            strings.append(data[start:position].decode("utf-8"))
        self._position = position
        return strings
