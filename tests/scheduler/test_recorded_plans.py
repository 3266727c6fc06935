"""The plans of all scenarios equal the recorded ones.

If a change is meant to change plans, write the recordings again; their diff shows which plans have changed:

    python tests/scheduler/test_recorded_plans.py
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from scheduler.scenarios import SCENARIOS, run

RECORDED = Path(__file__).with_name("recorded")


@pytest.mark.parametrize("name", SCENARIOS)
def test_plans_are_as_recorded(name):
    recorded = (RECORDED / f"{name}.txt").read_text().splitlines()
    for number, (now, before) in enumerate(zip(run(name), recorded, strict=False), start=1):
        assert now == before, f"step {number} of {name}"
    assert len(run(name)) == len(recorded)


if __name__ == "__main__":
    for name in SCENARIOS:
        (RECORDED / f"{name}.txt").write_text("\n".join(run(name)) + "\n")
