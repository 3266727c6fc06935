"""The soak of bench/soak.py, much shorter: the script works, and its checks hold."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "bench" / "soak.py"


def test_a_short_soak_finds_nothing():
    run = subprocess.run([sys.executable, str(SCRIPT), "--minutes", "0.2"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all checks passed" in run.stdout
