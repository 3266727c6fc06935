"""Running, swapped, waiting: one after the other, in one mixed step (vLLM V0's `_schedule_default`)."""

from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder


class ThreePhase(PhasePolicy):
    """Decodes, then those that come back, then whole prompts in what is left of the step.

    Only a group that is computed again after a preemption has chunks: each sequence's own output.
    """

    needs_whole_prompts = True

    def run(self, step: StepBuilder) -> None:
        """Decodes → chunks → swapped → whole-prompt admissions."""
        step.decodes()
        step.chunks()
        step.swapped()
        step.admissions(Cut.NEVER)
