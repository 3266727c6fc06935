"""Decodes first, then prompts in the rest of the token budget (vLLM's chunked prefill)."""

from treadle.scheduler.policies.base import PhasePolicy, StepBuilder


class Chunked(PhasePolicy):
    """Each step runs all decodes and fills the rest of its token budget with chunks of prompts.

    A decode never waits for a prompt. A long prompt is spread over as many steps as it takes.
    """

    def run(self, step: StepBuilder) -> None:
        """Decodes → chunks → swapped → admissions."""
        step.decodes()
        step.chunks()
        step.swapped()
        step.admissions()
