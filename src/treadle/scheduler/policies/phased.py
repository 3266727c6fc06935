"""A step is all prompts or all decodes (Nano-vLLM)."""

from treadle.scheduler.phases import Cut, Phases


class Phased:
    """Prompts first; decodes only in a step that could start or continue no prompt.

    Whole prompts, except that the first sequence of a step may be cut to the budget.

    Args:
        max_consecutive_prefills: Nano-vLLM decodes only when no prompt is left, so endless arrivals starve
            those that decode. Here, after this many prefill steps in a row, they get a step.
    """

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._max_consecutive_prefills = max_consecutive_prefills
        self._consecutive_prefills = 0

    def run(self, phases: Phases) -> None:
        """Chunks and admissions; if there are none, or decodes have waited long enough, decodes."""
        decodes_are_due = (
            phases.num_decoding > 0 and self._consecutive_prefills >= self._max_consecutive_prefills
        )
        if not decodes_are_due:
            phases.chunks(Cut.ONLY_FIRST)
            phases.admissions(Cut.ONLY_FIRST)
        if phases.is_empty:
            self._consecutive_prefills = 0
            phases.decodes()
        elif phases.num_decoding:
            self._consecutive_prefills += 1
