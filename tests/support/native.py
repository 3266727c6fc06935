"""The native kernels for tests: every build that this machine supports.

With TREADLE_TEST_SANITIZE=1 they are compiled with AddressSanitizer and UBSan (`make sanitize` sets everything up).
"""

import ctypes
import os
from ctypes import POINTER, c_float, c_int32, c_void_p
from functools import cache
from pathlib import Path

import pytest

from treadle.backends.cpu import BUILDS, best_build, load_library, missing_features
from treadle.backends.cpu.build import library_path
from treadle.backends.cpu.library import KVCacheStruct, WeightsStruct

# A processor that has AVX512's encoding of AVX-VNNI's instruction runs that build with it.
_ENCODED_OTHERWISE = {"avx_vnni": ("-mno-avxvnni", "-mavx512vl", "-mavx512vnni", "-DTREADLE_VNNI_256")}
_OTHER_FLAGS = {
    build: flags
    for build, flags in _ENCODED_OTHERWISE.items()
    if missing_features(build) and not missing_features("avx512_vnni")
}
RUNNABLE = [build for build in BUILDS if not missing_features(build) or build in _OTHER_FLAGS]
SANITIZED = bool(os.environ.get("TREADLE_TEST_SANITIZE"))
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g") if SANITIZED else ()

OPS = {
    "treadle_op_linear": [POINTER(WeightsStruct), c_void_p, c_int32, c_int32, c_void_p, c_int32],
    "treadle_op_linear_silu_mul": [POINTER(WeightsStruct)] * 2 + [c_void_p, c_int32, c_int32, c_void_p, c_int32],
    "treadle_op_unpack_row": [POINTER(WeightsStruct), c_int32, c_void_p],
    "treadle_op_rms_norm": [c_void_p, c_void_p, c_int32, c_float, c_int32, c_void_p],
    "treadle_op_rotary": [c_void_p, c_int32, c_int32, c_void_p, c_float, c_void_p, c_void_p, c_void_p],
    "treadle_op_store_kv": [POINTER(KVCacheStruct), c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p],
    "treadle_op_attention": [POINTER(KVCacheStruct), c_void_p] + [c_int32] * 5 + [c_void_p, c_void_p],
}
"""The functions of ops.cpp and their argument types."""


def native_library(build=None):
    """Return the kernels of a build, by default the best one. Skips the test if the machine supports none."""
    build = build or best_build()
    if build is None:
        pytest.skip("this processor has no native kernels")
    return load_library(build, (*FLAGS, *_OTHER_FLAGS.get(build, ())))


@cache
def native_ops(build):
    """Return the library of ops.cpp for a build, whose functions run one operation of the kernels each."""
    dll = ctypes.CDLL(
        str(library_path(build, (*FLAGS, *_OTHER_FLAGS.get(build, ())), Path(__file__).with_name("ops.cpp")))
    )
    for name, arguments in OPS.items():
        getattr(dll, name).argtypes = arguments
        getattr(dll, name).restype = None
    return dll
