"""Whole prompts whenever one can start, else decodes (the default path of vLLM 0.8's V0 scheduler)."""

from treadle.scheduler.phases import Cut, Phases
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class PrefillFirst:
    """A step starts all the prompts that it can; only if there are none, it decodes and takes back the swapped.

    Args:
        max_consecutive_prefills: after this many prefill steps in a row, those that decode get a step.
    """

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    def run(self, phases: Phases) -> None:
        """Whole-prompt admissions; if there are none, or decodes are due: decodes → chunks → swapped."""
        if not self._streak.decodes_are_due(phases):
            phases.admissions(Cut.NEVER)
        if phases.is_empty:
            self._streak.decoded()
            phases.decodes()
            phases.chunks()
            phases.swapped()
        else:
            self._streak.prefilled(phases)
