"""The native kernels, for tests: every build that this machine runs."""

import pytest

from treadle.kernels.cpu import BUILDS, best_build, load_library, missing_features

RUNNABLE = [build for build in BUILDS if not missing_features(build)]


def native_library(build=None):
    """The kernels of a build, the best one by default; the test is skipped where there is none."""
    build = build or best_build()
    if build is None:
        pytest.skip("this processor has no native kernels")
    return load_library(build)
