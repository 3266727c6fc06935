"""Whole prompts whenever one can start, otherwise decodes (the default path of vLLM 0.8's V0 scheduler)."""

from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class PrefillFirst(PhasePolicy):
    """Each step admits as many prompts as possible; if it can admit none, it decodes and swaps requests in.

    Args:
        max_consecutive_prefills: maximum number of prefill steps in a row while sequences are ready to decode.
    """

    needs_whole_prompts = True

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return the policy with `max_consecutive_prefills` of `config`."""
        return cls(config.max_consecutive_prefills)

    def run(self, step: StepBuilder) -> None:
        """Whole-prompt admissions; if none is possible, or decodes are due: decodes → chunks → swapped."""
        if not self._streak.decodes_are_due(step):
            step.admissions(Cut.NEVER)
        if step.is_empty:
            self._streak.decoded()
            step.decodes()
            step.chunks()
            step.swapped()
        else:
            self._streak.prefilled(step)
