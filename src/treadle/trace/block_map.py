"""Which request holds each KV block, as changes from step to step, so that a page can draw the pool at any step."""

from typing import Any

import numpy as np

from treadle.core.request import IntArray
from treadle.scheduler.report import CACHED, FREE, BlockHolders

BlockChanges = dict[str, Any]
"""Blocks whose state has changed, by their new state: {free, cached: runs; held, shared: request → runs}, with runs
as [first, count, first, count, …].

A block that several sequences share is listed under the first of their requests in rank order.
"""


class BlockMap:
    """Compares the blocks of the device tier with their state at the previous call.

    Args:
        num_blocks: size of the tier.
    """

    def __init__(self, num_blocks: int) -> None:
        holders: IntArray = np.full(num_blocks, FREE, dtype=np.int32)
        self._now = BlockHolders(holders, np.zeros(num_blocks, dtype=np.bool_), {})

    def changes(self, now: BlockHolders) -> BlockChanges:
        """The blocks that have changed since the previous call."""
        before, self._now = self._now, now
        return self._describe(np.flatnonzero((before.holders != now.holders) | (before.is_shared != now.is_shared)))

    def everything(self) -> BlockChanges:
        """All blocks except free ones, as of the latest call of `changes`."""
        return self._describe(np.flatnonzero(self._now.holders != FREE))

    def _describe(self, blocks: IntArray | np.ndarray[Any, Any]) -> BlockChanges:
        """The given blocks by their current state."""
        changes: BlockChanges = {}
        holders = self._now.holders[blocks]
        for name, code in (("free", FREE), ("cached", CACHED)):
            if (holders == code).any():
                changes[name] = runs(blocks[holders == code])
        for name, shared in (("held", False), ("shared", True)):
            chosen = (holders >= 0) & (self._now.is_shared[blocks] == shared)
            if chosen.any():
                numbers = np.unique(holders[chosen]).tolist()
                changes[name] = {self._now.names[n]: runs(blocks[chosen & (holders == n)]) for n in numbers}
        return changes


def runs(blocks: IntArray | np.ndarray[Any, Any]) -> list[int]:
    """Ascending numbers as [first, count, first, count, …]."""
    if not len(blocks):
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    counts = np.diff(starts, append=len(blocks))
    pairs: list[int] = np.stack([blocks[starts], counts], axis=1).reshape(-1).tolist()
    return pairs
