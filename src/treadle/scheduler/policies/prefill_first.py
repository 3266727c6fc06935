"""Whole prompts whenever one can start, else decodes (the default path of vLLM 0.8's V0 scheduler)."""

from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import Cut, PhasePolicy, StepBuilder
from treadle.scheduler.policies.prefill_streak import PrefillStreak


class PrefillFirst(PhasePolicy):
    """A step starts all the prompts that it can; only if there are none, it decodes and takes back the swapped.

    Args:
        max_consecutive_prefills: after this many prefill steps in a row, those that decode get a step.
    """

    needs_whole_prompts = True

    def __init__(self, max_consecutive_prefills: int) -> None:
        self._streak = PrefillStreak(max_consecutive_prefills)

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the bound of `config`."""
        return cls(config.max_consecutive_prefills)

    def run(self, step: StepBuilder) -> None:
        """Whole-prompt admissions; if there are none, or decodes are due: decodes → chunks → swapped."""
        if not self._streak.decodes_are_due(step):
            step.admissions(Cut.NEVER)
        if step.is_empty:
            self._streak.decoded()
            step.decodes()
            step.chunks()
            step.swapped()
        else:
            self._streak.prefilled(step)
