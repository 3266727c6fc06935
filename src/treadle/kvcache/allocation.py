"""Answers of the KVCacheManager: whether a request can get its blocks, and where they would come from."""

from dataclasses import dataclass
from enum import Enum

from treadle.core.request import Sequence


class AllocStatus(Enum):
    """Whether the blocks for a request are available: now, later when other requests have ended, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Where one sequence would get its blocks.

    Attributes:
        seq: the sequence.
        cached: ids of the blocks that the cache already holds, in order.
        last_entry: id of the last cached block's entry in the prefix index.
        num_shared: first blocks to share with the request's first sequence, which will compute them.
        num_new: further blocks to take.
    """

    seq: Sequence
    cached: tuple[int, ...]
    last_entry: int
    num_shared: int
    num_new: int


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """Where a request that holds no blocks would get them.

    Attributes:
        sequences: its unfinished sequences.
        num_cached_tokens: tokens of the first one that the cache already holds.
    """

    sequences: tuple[SequencePlan, ...]
    num_cached_tokens: int

    @property
    def num_new(self) -> int:
        """Blocks to take."""
        return sum(plan.num_new for plan in self.sequences)

    @property
    def cached(self) -> set[int]:
        """Cached blocks to reference."""
        return {block for plan in self.sequences for block in plan.cached}
