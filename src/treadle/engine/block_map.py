"""Who holds which KV block, told as changes from step to step, so that a page can draw the pool at any step."""

from typing import Any

import numpy as np

from treadle.request import IntArray
from treadle.scheduler import Scheduler

FREE, CACHED = -2, -1
"""In place of a request's number: a block with nothing in it, and one that only the prefix cache knows."""

BlockChanges = dict[str, Any]
"""Blocks by what they have become: {free, cached: runs; held, shared: request → runs}, with runs as
[first, count, first, count, …].

A block that several sequences share is told under the first of their requests in rank.
"""


class BlockMap:
    """Compares the blocks of the device tier with what they were when it last looked.

    Args:
        scheduler: whose pool it is.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holders: IntArray = np.full(scheduler.kv.pool.num_blocks, FREE, dtype=np.int32)
        self._is_shared = np.zeros(scheduler.kv.pool.num_blocks, dtype=np.bool_)
        self._names: dict[int, str] = {}

    def changes(self) -> BlockChanges:
        """What has changed since the last call."""
        holders, is_shared = self._holders, self._is_shared
        self._look()
        return self._describe(np.flatnonzero((holders != self._holders) | (is_shared != self._is_shared)))

    def everything(self) -> BlockChanges:
        """All blocks but the free ones, as they were at the last look."""
        return self._describe(np.flatnonzero(self._holders != FREE))

    def _look(self) -> None:
        scheduler, kv = self._scheduler, self._scheduler.kv
        rows = scheduler.batch.rows
        numbers = np.array([seq.request.arrival_number for seq in scheduler.batch.sequences[rows]], dtype=np.int32)
        holders = np.where(self._holders == CACHED, CACHED, FREE).astype(np.int32)
        was_held = self._holders >= 0
        for block in np.flatnonzero(was_held & (kv.pool.ref_counts == 0)).tolist():
            holders[block] = CACHED if kv.pool.is_cached_idle(block) else FREE
        holders[kv.pool.ref_counts > 0] = FREE
        if int((holders == CACHED).sum()) != kv.pool.num_cached_idle:
            # Blocks that came and went within the planning of one step.
            for block in np.flatnonzero(kv.pool.ref_counts == 0).tolist():
                holders[block] = CACHED if kv.pool.is_cached_idle(block) else FREE
        for row, number in zip(rows[::-1].tolist(), numbers[::-1].tolist(), strict=True):
            holders[kv.block_tables[row, : kv.num_blocks[row]]] = number
        self._holders, self._is_shared = holders, kv.pool.ref_counts > 1
        self._names = {seq.request.arrival_number: seq.request.request_id for seq in scheduler.batch.sequences[rows]}

    def _describe(self, blocks: IntArray | np.ndarray[Any, Any]) -> BlockChanges:
        """The given blocks, by what they are now."""
        changes: BlockChanges = {}
        holders = self._holders[blocks]
        for name, code in (("free", FREE), ("cached", CACHED)):
            if (holders == code).any():
                changes[name] = runs(blocks[holders == code])
        for name, shared in (("held", False), ("shared", True)):
            chosen = (holders >= 0) & (self._is_shared[blocks] == shared)
            if chosen.any():
                numbers = np.unique(holders[chosen]).tolist()
                changes[name] = {self._names[n]: runs(blocks[chosen & (holders == n)]) for n in numbers}
        return changes


def runs(blocks: IntArray | np.ndarray[Any, Any]) -> list[int]:
    """Ascending numbers as [first, count, first, count, …]."""
    if not len(blocks):
        return []
    starts = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    counts = np.diff(starts, append=len(blocks))
    pairs: list[int] = np.stack([blocks[starts], counts], axis=1).reshape(-1).tolist()
    return pairs
