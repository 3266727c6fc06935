"""Running, swapped, waiting: one after the other, in one mixed step (vLLM V0's `_schedule_default`)."""

from treadle.scheduler.phases import Cut, Phases


class ThreePhase:
    """Decodes, then those that come back, then whole prompts in what is left of the step.

    Only a group that is computed again after a preemption has chunks: each sequence's own output.
    """

    def run(self, phases: Phases) -> None:
        """Decodes → chunks → swapped → whole-prompt admissions."""
        phases.decodes()
        phases.chunks()
        phases.swapped()
        phases.admissions(Cut.NEVER)
