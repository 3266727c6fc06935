"""The blocks of one tier: which are free, how often each is referenced, which is reused next.

A block is in exactly one state:

=============  =========  ==============================================================
state          ref count  where
=============  =========  ==============================================================
referenced     > 0        in block tables
free           0          on the free stack; its content is not findable
cached-idle    0          in the eviction queue; its content is still findable
=============  =========  ==============================================================
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from treadle.core.request import IntArray


class BlockPool:
    """Free list, reference counts and eviction order of `num_blocks` blocks.

    Free blocks are allocated first, then cached-idle ones, least recently used first.

    Args:
        num_blocks: blocks of this tier.
        on_evict: called with a cached-idle block's id when the block is allocated again.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.ref_counts: IntArray = np.zeros(num_blocks, dtype=np.int32)
        # A stack in an array, so that many blocks are taken in one slice. Low ids are on top at the start.
        self._free: IntArray = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        self._cached_idle: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached-idle."""
        return self._num_free + len(self._cached_idle)

    @property
    def num_cached_idle(self) -> int:
        """Blocks without references whose content is still findable."""
        return len(self._cached_idle)

    def is_cached_idle(self, block: int) -> bool:
        """Whether `block` has no references and its content is still findable."""
        return block in self._cached_idle

    def cached_idle_block_ids(self) -> list[int]:
        """Ids of the cached-idle blocks, in the order in which they are reused."""
        return list(self._cached_idle)

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks (without the cached-idle ones), for checks."""
        blocks: list[int] = self._free[: self._num_free].tolist()
        return blocks

    def take(self, count: int) -> IntArray:
        """Allocate `count` blocks with one reference each: int32 [count].

        The caller ensures `count <= num_available`.
        """
        from_free = min(count, self._num_free)
        top = self._num_free
        blocks = self._free[top - from_free : top][::-1].copy()
        self._num_free -= from_free
        if from_free < count:
            evicted = [self._cached_idle.popitem(last=False)[0] for _ in range(count - from_free)]
            for block in evicted:
                self._on_evict(block)
            blocks = np.concatenate([blocks, np.array(evicted, dtype=np.int32)])
        self.ref_counts[blocks] = 1
        return blocks

    def reference(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; cached-idle ones leave the eviction queue."""
        for block in blocks:
            self._cached_idle.pop(block, None)
            self.ref_counts[block] += 1

    def release(self, blocks: IntArray, is_cached: Callable[[int], bool]) -> None:
        """Drop one reference to each of the distinct `blocks`, which are ordered by when they may be reused.

        Args:
            blocks: int32 [n], no block twice.
            is_cached: whether a block's content is findable; such blocks become cached-idle.
        """
        self.ref_counts[blocks] -= 1
        unreferenced = blocks[self.ref_counts[blocks] == 0]
        worthless = []
        for block in unreferenced.tolist():
            if is_cached(block):
                self._cached_idle[block] = None
            else:
                worthless.append(block)
        # The stack pops its top first: push in reverse, so that the first block released is the first reused.
        end = self._num_free + len(worthless)
        self._free[self._num_free : end] = worthless[::-1]
        self._num_free = end
