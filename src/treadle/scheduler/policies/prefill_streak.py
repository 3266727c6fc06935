"""Keeps policies that put prompts first from starving those that decode."""

from treadle.scheduler.policies.base import StepBuilder


class PrefillStreak:
    """Counts prefill steps in a row while somebody waits to decode.

    Args:
        limit: after this many, decodes are due.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0

    def decodes_are_due(self, step: StepBuilder) -> bool:
        """Whether this step has to decode."""
        return step.num_decoding > 0 and self._length >= self._limit

    def prefilled(self, step: StepBuilder) -> None:
        """This step is for prompts."""
        if step.num_decoding:
            self._length += 1

    def decoded(self) -> None:
        """This step is for decodes."""
        self._length = 0
