"""A step is all prompts or all decodes (Nano-vLLM)."""

from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class Phased(PhasePolicy):
    """Prompts first; decodes only in a step that could start or continue no prompt.

    Whole prompts, except that the first sequence of a step may be cut to the budget.

    Args:
        max_consecutive_prefills: Nano-vLLM decodes only when no prompt is left, so endless arrivals starve
            those that decode. Here, after this many prefill steps in a row, they get a step.
    """

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the bound of `config`."""
        return cls(config.max_consecutive_prefills)

    def run(self, step: StepBuilder) -> None:
        """Chunks → admissions; if there are none, or decodes are due: decodes → swapped."""
        if not self._streak.decodes_are_due(step):
            step.chunks(Cut.ONLY_FIRST)
            step.admissions(Cut.ONLY_FIRST)
        if step.is_empty:
            self._streak.decoded()
            step.decodes()
            step.swapped()
        else:
            self._streak.prefilled(step)
