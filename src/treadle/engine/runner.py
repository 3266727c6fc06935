"""What the engine needs of whatever computes a step."""

from typing import Protocol

from treadle.scheduler import StepPlan, StepResult


class Runner(Protocol):
    """Computes steps. Keeps no request state beyond what it wrote into the blocks."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: write the KV of its tokens, and sample where the plan says so."""
        ...
