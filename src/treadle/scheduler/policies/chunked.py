"""Decodes first, prompts in what is left (vLLM's chunked prefill)."""

from treadle.scheduler.policies.base import PhasePolicy, StepBuilder


class Chunked(PhasePolicy):
    """Every step decodes all it can and fills the rest of its budget with parts of prompts.

    Nobody who decodes ever waits for a prompt, and a long prompt is spread over as many steps as it takes.
    """

    def run(self, step: StepBuilder) -> None:
        """Decodes → chunks → swapped → admissions."""
        step.decodes()
        step.chunks()
        step.swapped()
        step.admissions()
