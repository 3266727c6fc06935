"""Decodes first, prompts in what is left (vLLM's chunked prefill)."""

from treadle.scheduler.phases import Phases


class Chunked:
    """Every step decodes all it can and fills the rest of its budget with parts of prompts.

    Nobody who decodes ever waits for a prompt, and a long prompt is spread over as many steps as it takes.
    """

    def run(self, phases: Phases) -> None:
        """Decodes → chunks → swapped → admissions."""
        phases.decodes()
        phases.chunks()
        phases.swapped()
        phases.admissions()
