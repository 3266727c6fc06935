"""The compiled kernels, called through ctypes. The structures mirror those in csrc."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.backends.cpu.arena import ALIGNMENT, round_up
from treadle.backends.cpu.build import KernelBuildError, library_path

# Constants of csrc. Library compares them, and the structures' sizes, with what the compiled library has.
PANEL = 32
GROUP = 64
BLOCK_GROUP = 32
CELL = 16
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 64

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]


def _structure(name: str, fields: Sequence[tuple[str, Any]]) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": list(fields)})


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


def _ints(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_int32) for name in names]


FORMATS = ("BF16", "INT8", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
"""Formats of a packed matrix, in the order of csrc; those from Q4_0 on are GGUF's block formats."""
BLOCK_FORMATS = FORMATS[2:]
NARROWINGS = ("bfloat16", "int8", "blocks")
"""How activations are narrowed: for weights in bfloat16, in int8, and in block formats."""

WeightsStruct = _structure("Weights", _pointers("data", "bias") + _ints("n", "k", "format"))
LayerStruct = _structure(
    "Layer",
    [
        ("input_norm", c_void_p),
        *[(name, WeightsStruct) for name in ("q", "k", "v")],
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("o", WeightsStruct),
        ("post_norm", c_void_p),
        *[(name, WeightsStruct) for name in ("gate", "up", "down")],
        *_pointers("cosines", "sines"),
    ],
)
ModelStruct = _structure(
    "Model",
    [
        *_ints("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "narrowing"),
        ("eps", c_float),
        ("embedding", WeightsStruct),
        ("layer", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("head", WeightsStruct),
    ],
)
KVCacheStruct = _structure(
    "KVCache", [("base", c_void_p), ("layers", c_int64), *_ints("block_size", "kv_heads", "dim", "is_int8")]
)
StepStruct = _structure(
    "Step",
    [
        *_pointers("token_ids", "positions", "rows", "tables", "run_start", "run_count"),
        ("table_stride", c_int64),
        *_ints("tokens", "runs", "threads"),
    ],
)
DrawsStruct = _structure(
    "Draws",
    _pointers("logits", "place", "temperature", "top_p", "min_p", "top_k", "noise", "greedy", "token_ids")
    + _ints("rows", "vocab", "threads"),
)
ReportsStruct = _structure(
    "Reports",
    _pointers("logits", "place", "token_ids", "num_top", "logprobs", "ranks", "top_ids", "top_logprobs")
    + _ints("rows", "max_top", "vocab", "threads"),
)
PenaltiesStruct = _structure(
    "Penalties",
    [
        *_pointers(
            "logits", "place", "token_rows", "tokens", "num_tokens", "num_prompt_tokens", "repetition", "presence",
            "frequency",
        ),
        ("token_stride", c_int64),
        *_ints("rows", "vocab", "threads"),
    ],
)  # fmt: skip

ABI: Mapping[str, int] = {
    "PANEL": PANEL,
    "GROUP": GROUP,
    "BLOCK_GROUP": BLOCK_GROUP,
    "CELL": CELL,
    "MAX_HEAD_DIM": MAX_HEAD_DIM,
    "MAX_GROUP_SIZE": MAX_GROUP_SIZE,
} | {
    f"sizeof {struct.__name__}": ctypes.sizeof(struct)
    for struct in (
        WeightsStruct, LayerStruct, ModelStruct, KVCacheStruct, StepStruct, DrawsStruct, ReportsStruct,
        PenaltiesStruct,
    )
}  # fmt: skip
"""What this module mirrors of csrc."""


class _AbiEntry(Structure):
    _fields_ = (("name", c_char_p), ("value", c_int64))


# Of each function: its result, and its arguments. Pointers to arrays are plain addresses.
_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "treadle_abi": (POINTER(_AbiEntry), []),
    "treadle_matrix_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "treadle_pack": (c_int64, [c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32]),
    "treadle_create": (c_void_p, [POINTER(ModelStruct), POINTER(KVCacheStruct)]),
    "treadle_destroy": (None, [c_void_p]),
    "treadle_forward": (c_int32, [c_void_p, POINTER(StepStruct)]),
    "treadle_logits": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32]),
    "treadle_block_bytes": (c_int64, [POINTER(KVCacheStruct)]),
    "treadle_draw": (c_int32, [POINTER(DrawsStruct)]),
    "treadle_report": (c_int32, [POINTER(ReportsStruct)]),
    "treadle_penalize": (c_int32, [POINTER(PenaltiesStruct)]),
}


def pointer(array: Array | None) -> int | None:
    """Address of a C-contiguous array; the caller keeps it alive."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


class Library:
    """The kernels of one build.

    Args:
        path: of the compiled library.
        build: its name.

    Attributes:
        build: one of BUILDS.
        dll: its functions, by the names in csrc/treadle.cpp. Those that find no memory raise MemoryError.

    Raises:
        KernelBuildError: the library cannot be loaded, or was made from other sources than this module mirrors.
    """

    def __init__(self, path: str, build: str) -> None:
        self.build = build
        try:
            self.dll = ctypes.CDLL(path)
        except OSError as error:
            raise KernelBuildError(
                f"{path} cannot be loaded ({error}); install what it lacks, or set TREADLE_CACHE_DIR to a folder on "
                f"a file system that is not mounted with noexec"
            ) from error
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self.dll, name)
            except AttributeError:
                raise _mismatch(path, f"it has no function {name}") from None
            function.restype, function.argtypes = result, arguments
        self._check_abi(path)
        self.dll.treadle_create.errcheck = _check_created
        for name in ("forward", "logits", "draw", "report", "penalize"):
            getattr(self.dll, f"treadle_{name}").errcheck = _check_status

    def _check_abi(self, path: str) -> None:
        compiled = {}
        for entry in self.dll.treadle_abi():
            if entry.name is None:
                break
            compiled[entry.name.decode()] = entry.value
        for name in sorted({*ABI, *compiled}):
            if ABI.get(name) != compiled.get(name):
                raise _mismatch(path, f"{name} is {compiled.get(name)} in it and {ABI.get(name)} in Python")

    def matrix_bytes(self, form: str, rows: int, columns: int) -> int:
        """Bytes of a packed matrix [rows, columns] in one of FORMATS, up to the next one's place."""
        return round_up(int(self.dll.treadle_matrix_bytes(FORMATS.index(form), rows, columns)), ALIGNMENT)

    def pack(
        self,
        form: str,
        source: Array,
        rows: int,
        columns: int,
        data: npt.NDArray[np.uint8],
        threads: int = 1,
    ) -> int:
        """Pack a matrix into `data`.

        Args:
            form: one of FORMATS.
            source: float32 [rows, columns] for BF16 and INT8, else GGUF blocks, uint8 [rows, row_bytes].
            rows, columns: of the matrix.
            data: [matrix_bytes], zeros.
            threads: number of threads.

        Returns:
            The number of groups of 32 weights whose scale is NaN or infinite; 0 for BF16 and INT8.
        """
        assert len(data) >= self.dll.treadle_matrix_bytes(FORMATS.index(form), rows, columns)
        args = pointer(source), rows, columns, pointer(data), threads
        return int(self.dll.treadle_pack(FORMATS.index(form), *args))

    def kv_block_bytes(self, kv: Structure) -> int:
        """Bytes of one KV block, all layers."""
        return int(self.dll.treadle_block_bytes(byref(kv)))


def _mismatch(path: str, what: str) -> KernelBuildError:
    return KernelBuildError(
        f"{path} does not fit this version of Treadle: {what}; delete the file, so that it is compiled again, and if "
        f"that does not help, reinstall Treadle"
    )


def _check_created(engine: Any, function: Any, arguments: Any) -> Any:
    if engine is None:
        raise MemoryError("the native kernels found no memory for an engine")
    return engine


def _check_status(status: Any, function: Any, arguments: Any) -> Any:
    if status:
        raise MemoryError(f"the native kernels found no memory for a step ({function.__name__})")


@cache
def load_library(build: str, extra_flags: tuple[str, ...] = ()) -> Library:
    """The kernels of `build`, compiled if need be; KernelBuildError if that fails."""
    return Library(str(library_path(build, extra_flags)), build)


def kv_cache_struct(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, int8: bool, base: int | None = None
) -> Structure:
    """The KV cache's shape, and where it lies."""
    return KVCacheStruct(base, num_layers, block_size, num_kv_heads, round_up(head_dim, CELL), int8)
