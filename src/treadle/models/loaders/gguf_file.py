"""The container format of GGUF: header, metadata, tensor table.

The `gguf` package reads it too, but makes a numpy array of every string of the vocabulary, which takes
seconds; this takes a tenth of a second (docs/decisions/003-gguf-header.md). Quantized blocks are decoded by the
package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.core.errors import ModelLoadError
from treadle.core.metadata import MAX_SIZE, ModelMetadata

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@cache
def _quant_sizes() -> dict[int, tuple[int, int]]:
    """GGML's number of a quantization → elements and bytes of a block."""
    from gguf import GGML_QUANT_SIZES

    return {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        name: in the file.
        shape: in torch's order, the last dimension contiguous; every dimension is at least 1.
        type_id: GGML's number of the quantization.
        offset: bytes from the start of the data section.
        row_bytes: bytes of the last dimension; 0 for a quantization that the `gguf` package does not know.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """A GGUF file, mapped into memory.

    Opening it takes time and memory in proportion to the header, whatever sizes the header claims.

    Attributes:
        path: of the file.
        metadata: key → value, arrays as lists.
        tensors: name → where it lies; each lies within the file, and none overlap.

    Raises:
        ModelLoadError: the file is missing, is not GGUF, ends too early, or contradicts itself.
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
                f"{path}: damaged or cut off near byte {self._position} of {len(self._data)} ({error})"
            ) from error

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: [*shape[:-1], row_bytes]."""
        start = self._data_start + info.offset
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=start)
        return raw.reshape(*info.shape[:-1], info.row_bytes)

    def forget(self, info: TensorInfo) -> None:
        """Let the system take back the memory of a tensor's bytes; they are read again if they are needed."""
        if hasattr(self._data, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            start = self._data_start + info.offset
            aligned = start - start % mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, aligned, start - aligned + info.num_bytes)

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
            if key in self.metadata:
                raise ModelLoadError(f"{self.path}: the key {key!r} occurs twice")
            self.metadata[key] = self._value(key, self._scalar("I"))
        for _ in range(num_tensors):
            info = self._tensor_info()
            if info.name in self.tensors:
                raise ModelLoadError(f"{self.path}: the tensor {info.name!r} occurs twice")
            self.tensors[info.name] = info
        alignment = ModelMetadata(self.metadata, str(self.path)).integer("general.alignment", 32)
        self._data_start = -(-self._position // alignment) * alignment
        self._check_offsets(alignment)

    def _tensor_info(self) -> TensorInfo:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ModelLoadError(
                f"{self.path}: {name} must have 1 to {_MAX_DIMENSIONS} dimensions, got {num_dimensions}"
            )
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        if not all(1 <= size <= MAX_SIZE for size in shape):
            raise ModelLoadError(f"{self.path}: {name} must have dimensions from 1 to {MAX_SIZE}, got {shape}")
        type_id, offset = self._scalar("I"), self._scalar("Q")
        block_size, bytes_per_block = _quant_sizes().get(type_id, (1, 0))
        if shape[-1] % block_size:
            raise ModelLoadError(
                f"{self.path}: {name} must have a multiple of {block_size} as its last dimension, got {shape}"
            )
        return TensorInfo(name, shape, type_id, offset, shape[-1] // block_size * bytes_per_block)

    def _check_offsets(self, alignment: int) -> None:
        end, previous = 0, ""
        for info in sorted(self.tensors.values(), key=lambda info: info.offset):
            start = self._data_start + info.offset
            if info.offset % alignment:
                raise ModelLoadError(
                    f"{self.path}: the offset of {info.name} must be a multiple of {alignment}, got {info.offset}"
                )
            if info.offset < end:
                raise ModelLoadError(f"{self.path}: the tensors {previous} and {info.name} overlap")
            end, previous = info.offset + info.num_bytes, info.name
            if start + info.num_bytes > len(self._data):
                raise ModelLoadError(
                    f"{self.path}: cut off; {info.name} needs bytes {start} to {start + info.num_bytes}, "
                    f"the file has {len(self._data)}"
                )

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

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelLoadError(f"{self.path}: {key} has the unknown type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:
            what = "an array of arrays" if element == _ARRAY else f"an array of the unknown type {element}"
            raise ModelLoadError(f"{self.path}: {key} is {what}")
        code = f"<{count}{_SCALARS[element]}"
        return list(struct.unpack(code, self._bytes(struct.calcsize(code))))

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
