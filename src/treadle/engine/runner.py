"""What the engine needs of whatever computes a step."""

from typing import Protocol

from treadle.scheduler import StepPlan, StepResult


class Runner(Protocol):
    """Computes steps. Keeps no request state beyond what it wrote into the blocks.

    Attributes:
        supports_lora: whether it computes LoRA adapters; if not, requests for them are refused.
    """

    supports_lora: bool

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: move blocks, write the KV of its tokens, and sample where the plan says so."""
        ...
