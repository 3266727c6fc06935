"""The protocol between the engine and what executes its steps."""

from typing import Protocol

from treadle.scheduler import StepPlan, StepResult


class Runner(Protocol):
    """Executes steps. What it knows of requests comes from the plans.

    Attributes:
        supports_lora: whether it computes LoRA adapters; if not, requests that use them are refused.
    """

    supports_lora: bool

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step: move blocks, write the KV of its tokens, and sample where the plan says so."""
        ...
