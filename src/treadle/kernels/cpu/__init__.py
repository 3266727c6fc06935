"""The native CPU kernels: a small C++ library, compiled on first use for the processor it runs on.

`build` compiles and caches it, `library` calls it, `arena` holds packed weights; the kernels are in `csrc`.
"""

from treadle.kernels.cpu.build import BUILDS, KernelBuildError, best_build, missing_features
from treadle.kernels.cpu.library import Library, load_library

__all__ = ["BUILDS", "KernelBuildError", "Library", "best_build", "load_library", "missing_features"]
