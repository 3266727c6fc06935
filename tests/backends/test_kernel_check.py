"""The kernels against plain scalar code, in a program of their own: those of ARM are run by an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.native import SANITIZED
from treadle.backends.cpu import best_build
from treadle.backends.cpu.build import SOURCES, compiler_flags

PROGRAM = Path(__file__).parents[1] / "support" / "kernel_check.cpp"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = next((name for name in ("qemu-aarch64-static", "qemu-aarch64") if shutil.which(name)), None)
EMULATED = {"neon_dotprod": "neoverse-n1", "neon": "cortex-a72"}
"""Build → a processor that has its features and no others that matter."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SANITIZED, reason="the program is compiled without the sanitizers"),
]


def run_check(build, folder, compiler, emulator=()):
    """Compile the program with the flags of a build and return what it prints."""
    program = folder / "kernel_check"
    subprocess.run(
        [*compiler, *compiler_flags(build), f"-I{SOURCES}", f"-I{PROGRAM.parent}", str(PROGRAM), "-o", str(program)],
        check=True,
    )
    result = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.skipif(best_build() is None, reason="this processor has no native kernels")
def test_the_best_build_agrees_with_scalar_code(tmp_path):
    assert "checks passed" in run_check(best_build(), tmp_path, ["g++"])


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"there is no {CROSS_COMPILER}")
@pytest.mark.skipif(EMULATOR is None, reason="there is no qemu-aarch64")
@pytest.mark.parametrize("build", EMULATED)
def test_the_builds_for_arm_agree_with_scalar_code(build, tmp_path):
    emulator = [EMULATOR, "-cpu", EMULATED[build]]
    assert "4 floats a vector" in run_check(build, tmp_path, [CROSS_COMPILER, "-static"], emulator)
