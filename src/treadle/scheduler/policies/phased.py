"""Steps that run either prompts or decodes (Nano-vLLM)."""

from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class Phased(PhasePolicy):
    """Prompts first; decodes only in a step that can start or continue no prompt.

    Prompts are computed whole, except that the first sequence of a step may be cut to the token budget.

    Args:
        max_consecutive_prefills: maximum number of prefill steps in a row while sequences are ready to decode.
            Nano-vLLM has no such limit, so a steady stream of arrivals starves the decodes.
    """

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return the policy with `max_consecutive_prefills` of `config`."""
        return cls(config.max_consecutive_prefills)

    def run(self, step: StepBuilder) -> None:
        """Chunks → admissions; if there is nothing to prefill, or decodes are due: decodes → swapped."""
        if not self._streak.decodes_are_due(step):
            step.chunks(Cut.ONLY_FIRST)
            step.admissions(Cut.ONLY_FIRST)
        if step.is_empty:
            self._streak.decoded()
            step.decodes()
            step.swapped()
        else:
            self._streak.prefilled(step)
