"""The native kernels, for tests: every build that this machine runs.

With TREADLE_TEST_SANITIZE=1 they are compiled with AddressSanitizer and UBSan (`make sanitize` sets all of it up).
"""

import os

import pytest

from treadle.backends.cpu import BUILDS, best_build, load_library, missing_features

RUNNABLE = [build for build in BUILDS if not missing_features(build)]
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")


def native_library(build=None):
    """The kernels of a build, the best one by default; the test is skipped where there is none."""
    build = build or best_build()
    if build is None:
        pytest.skip("this processor has no native kernels")
    return load_library(build, SANITIZE if os.environ.get("TREADLE_TEST_SANITIZE") else ())
