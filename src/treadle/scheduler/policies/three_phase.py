"""Running, swapped and waiting requests, one after the other in one mixed step (vLLM V0's `_schedule_default`)."""

from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder


class ThreePhase(PhasePolicy):
    """Decodes, then swapped requests, then whole prompts in the rest of the token budget.

    The only chunks are those of a request with several sequences that is recomputed after a preemption: each
    sequence's own output.
    """

    needs_whole_prompts = True

    def run(self, step: StepBuilder) -> None:
        """Decodes → chunks → swapped → whole-prompt admissions."""
        step.decodes()
        step.chunks()
        step.swapped()
        step.admissions(Cut.NEVER)
