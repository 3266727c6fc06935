"""A step is all prompts or all decodes (Nano-vLLM)."""

from treadle.scheduler.phases import Cut, Phases
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class Phased:
    """Prompts first; decodes only in a step that could start or continue no prompt.

    Whole prompts, except that the first sequence of a step may be cut to the budget.

    Args:
        max_consecutive_prefills: Nano-vLLM decodes only when no prompt is left, so endless arrivals starve
            those that decode. Here, after this many prefill steps in a row, they get a step.
    """

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    def run(self, phases: Phases) -> None:
        """Chunks → admissions; if there are none, or decodes are due: decodes → swapped."""
        if not self._streak.decodes_are_due(phases):
            phases.chunks(Cut.ONLY_FIRST)
            phases.admissions(Cut.ONLY_FIRST)
        if phases.is_empty:
            self._streak.decoded()
            phases.decodes()
            phases.swapped()
        else:
            self._streak.prefilled(phases)
