"""The KVCacheManager owns every block table and is the only one to change it.

For one sequence of `num_tokens` tokens in a pool with blocks of B slots::

    |<-- cached prefix -->|<---- computed ---->|<-- to compute -->|  room in the last block  |
    0        a multiple of B        num_computed_tokens       num_tokens          num_blocks * B

Blocks for everything up to `num_tokens` are taken when the sequence is admitted; after that it grows by one
block whenever a token would fall outside (`append`).
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from treadle.kvcache.block_pool import BlockPool
from treadle.kvcache.prefix_index import ROOT, BlockKey, PrefixIndex
from treadle.request import IntArray, Sequence


class AllocStatus(Enum):
    """Whether blocks for a request can be had: now, later when others have ended, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The part of a sequence that the cache already holds.

    Attributes:
        blocks: ids of the blocks, in order.
        last_entry: id of the last block's entry in the index.
    """

    blocks: tuple[int, ...] = ()
    last_entry: int = ROOT


NO_PREFIX = CachedPrefix()


class KVCacheManager:
    """Block tables of the running sequences, over one pool of blocks.

    Args:
        num_blocks: blocks in the pool.
        block_size: token slots of a block.
        max_rows: sequences that can hold blocks at once; rows are the batch's.
        max_model_len: most tokens of one sequence.
        enable_prefix_caching: whether full blocks stay findable after their sequence has ended.

    Attributes:
        block_tables: int32 [max_rows, max_blocks]; row r is valid up to num_blocks[r].
        num_blocks: int32 [max_rows], blocks that each row holds.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.index = PrefixIndex() if enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables: IntArray = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.num_blocks: IntArray = np.zeros(max_rows, dtype=np.int32)
        # Per row: how many of its blocks have been offered to the index, and the entry of the last of them.
        self._num_indexed = [0] * max_rows
        self._last_entry = [ROOT] * max_rows
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # Questions

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Share of the pool that sequences reference, 0 to 1."""
        return 1.0 - self.pool.num_available / self.pool.num_blocks

    @property
    def version(self) -> int:
        """Grows whenever the cache may hold a longer prefix than before."""
        return 0 if self.index is None else self.index.version

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> CachedPrefix:
        """The longest cached prefix of a sequence that holds no blocks.

        The last token is never taken from the cache, because its logits are needed. A request for prompt
        logprobs takes nothing, because it needs the logits of the whole prompt.
        """
        if self.index is None or seq.request.sampling_params.prompt_logprobs is not None:
            return NO_PREFIX
        blocks: list[int] = []
        parent = ROOT
        for i in range((seq.num_tokens - 1) // self.block_size):
            entry = self.index.find(self._key(seq, i, parent))
            if entry is None:
                break
            blocks.append(entry.block)
            parent = entry.entry_id
        return CachedPrefix(tuple(blocks), parent)

    def can_allocate(self, seq: Sequence, prefix: CachedPrefix, headroom: int = 0) -> AllocStatus:
        """Whether the blocks that `seq` needs beyond `prefix` can be taken, leaving `headroom` blocks."""
        needed = self.blocks_for(seq.num_tokens)
        if needed > self.pool.num_blocks:
            return AllocStatus.NEVER
        # Idle blocks of the prefix are available ones; taking them leaves fewer for the rest.
        idle_hits = sum(map(self.pool.is_cached_idle, prefix.blocks))
        new = needed - len(prefix.blocks)
        return AllocStatus.OK if new + idle_hits + headroom <= self.pool.num_available else AllocStatus.LATER

    def rows_to_grow(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Those of `rows` whose blocks do not cover their `num_tokens` tokens: int32 [n ≤ len(rows)]."""
        return rows[num_tokens > self.num_blocks[rows] * self.block_size]

    def frees_a_block(self, row: int) -> bool:
        """Whether freeing `row` would make a block available (it does not when all are shared)."""
        blocks = self.block_tables[row, : self.num_blocks[row]]
        return bool((self.pool.ref_counts[blocks] == 1).any())

    def block_table(self, row: int) -> list[int]:
        """The block ids of `row`, in order."""
        blocks: list[int] = self.block_tables[row, : self.num_blocks[row]].tolist()
        return blocks

    # Commands

    def allocate(self, seq: Sequence, row: int, prefix: CachedPrefix) -> int:
        """Give `row` the cached prefix and new blocks for the rest of `seq`.

        The caller has asked `can_allocate`. Returns how many tokens the prefix covers.
        """
        self.pool.reference(prefix.blocks)
        num_hits = len(prefix.blocks)
        needed = self.blocks_for(seq.num_tokens)
        self.block_tables[row, :num_hits] = prefix.blocks
        self.block_tables[row, num_hits:needed] = self.pool.take(needed - num_hits)
        self.num_blocks[row] = needed
        self._num_indexed[row] = num_hits
        self._last_entry[row] = prefix.last_entry
        self.num_prefix_queries += seq.num_tokens
        self.num_prefix_hits += num_hits * self.block_size
        return num_hits * self.block_size

    def append(self, rows: IntArray) -> None:
        """Give each of the distinct `rows` one more block; the caller has seen that there are enough."""
        self.block_tables[rows, self.num_blocks[rows]] = self.pool.take(len(rows))
        self.num_blocks[rows] += 1

    def index_computed(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks within the first `num_tokens` tokens of a running sequence findable.

        Their KV must be written.
        """
        row = seq.row
        if self.index is None or row is None:
            return
        parent = self._last_entry[row]
        for i in range(self._num_indexed[row], num_tokens // self.block_size):
            parent = self.index.add(self._key(seq, i, parent), int(self.block_tables[row, i])).entry_id
            self._num_indexed[row] = i + 1
        self._last_entry[row] = parent

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a running sequence, after making its full blocks findable.

        Blocks of the tail come first in the order of reuse, so that beginnings stay findable longest.
        """
        assert seq.row is not None
        self.index_computed(seq, seq.num_computed_tokens)
        row = seq.row
        blocks = self.block_tables[row, : self.num_blocks[row]][::-1].copy()
        self.pool.release(blocks, is_cached=self._is_indexed)
        self.num_blocks[row] = 0
        self._num_indexed[row] = 0
        self._last_entry[row] = ROOT

    def _key(self, seq: Sequence, block_number: int, parent: int) -> BlockKey:
        start = block_number * self.block_size
        tokens = seq.token_ids[start : start + self.block_size].tobytes()
        return BlockKey(parent, tokens, seq.request.cache_salt)

    def _is_indexed(self, block: int) -> bool:
        return self.index is not None and self.index.holds(block)

    def _forget(self, block: int) -> None:
        assert self.index is not None
        self.index.remove(block)
