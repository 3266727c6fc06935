"""Prevents the starvation of decodes under policies that put prompts first."""

from treadle.scheduler.policies.base import StepBuilder


class PrefillStreak:
    """Counts consecutive prefill steps while sequences are ready to decode.

    Args:
        limit: number of prefill steps after which decodes are due.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0

    def decodes_are_due(self, step: StepBuilder) -> bool:
        """Whether this step has to decode."""
        return step.num_decoding > 0 and self._length >= self._limit

    def prefilled(self, step: StepBuilder) -> None:
        """Record that this step runs prompts."""
        if step.num_decoding:
            self._length += 1

    def decoded(self) -> None:
        """Record that this step runs decodes."""
        self._length = 0
