"""The KVCacheManager owns every block table; no other code changes one.

For one sequence of `num_tokens` tokens in a pool with blocks of B slots::

    |<-- cached prefix -->|<---- computed ---->|<-- to compute -->|  room in the last block  |
    0        a multiple of B        num_computed_tokens       num_tokens          num_blocks * B

Blocks for all of `num_tokens` are allocated when the sequence is admitted; after that it grows by one block
whenever a token would not fit (`append`). Sequences of one request share blocks by reference count; before one
of them writes into a shared block, it gets a copy of its own (`copy_shared_tail`).

There are two tiers of blocks: the device tier, where the runner computes, and the host tier, which holds the
blocks of swapped requests.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from treadle.core.request import IntArray, Request, Sequence
from treadle.kvcache.allocation import AllocationPlan, AllocStatus, SequencePlan
from treadle.kvcache.block_pool import BlockPool
from treadle.kvcache.prefix_index import ROOT, BlockKey, Namespace, PrefixIndex

BlockPairs = list[tuple[int, int]]
"""(source block, target block)."""


class KVCacheManager:
    """Block tables of the running and the swapped sequences.

    Args:
        num_blocks: blocks of the device tier.
        num_host_blocks: blocks of the host tier.
        block_size: token slots of a block.
        max_rows: sequences that can hold device blocks at once; rows are the batch's.
        max_tokens: maximum number of token slots of one sequence.
        enable_prefix_caching: whether full blocks stay findable after their sequence has ended.

    Attributes:
        block_tables: int32 [max_rows, max_blocks]; row r is valid up to num_blocks[r].
        num_blocks: int32 [max_rows], blocks that each row holds.
        pool, host_pool: the tiers.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_tokens: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.index = PrefixIndex() if enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, on_evict=_never if self.index is None else self.index.remove)
        self.host_pool = BlockPool(num_host_blocks, on_evict=_never)
        max_blocks = -(-max_tokens // block_size)
        self.block_tables: IntArray = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.num_blocks: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.num_tokens_covered: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.host_tables: dict[Sequence, IntArray] = {}
        self._is_indexed = _never_cached if self.index is None else self.index.holds
        # Per row: how many of its blocks have been added to the index, and the entry of the last one.
        self._num_indexed = [0] * max_rows
        self._last_entry = [ROOT] * max_rows
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        # Blocks that running rows received since the last `take_changes`: (rows, places, blocks).
        self._changes: list[tuple[IntArray, IntArray, IntArray]] = []

    # Questions

    @property
    def num_available_blocks(self) -> int:
        """Device blocks that can be allocated now."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Fraction of the device tier that sequences reference, 0 to 1."""
        return 1.0 - self.pool.num_available / self.pool.num_blocks

    @property
    def version(self) -> int:
        """Increases whenever the cache may hold a longer prefix than before."""
        return 0 if self.index is None else self.index.version

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def plan_allocation(self, request: Request) -> AllocationPlan:
        """Where the unfinished sequences of a request that holds no blocks would get theirs.

        Each takes the longest cached prefix. A recomputed group computes its prompt once: the other sequences
        share the first one's full blocks of it, unless the cache holds more.
        """
        plans: list[SequencePlan] = []
        for seq in request.live_sequences:
            cached, last_entry = self._find_prefix(seq)
            shared = 0
            if plans:
                shared = seq.num_prompt_tokens // self.block_size
                if len(cached) >= shared:
                    shared = 0
                else:
                    cached, last_entry = (), ROOT
            new = self.blocks_for(seq.num_tokens) - len(cached) - shared
            plans.append(SequencePlan(seq, cached, last_entry, shared, new))
        return AllocationPlan(tuple(plans), len(plans[0].cached) * self.block_size)

    def can_allocate(self, plan: AllocationPlan, headroom: int = 0) -> AllocStatus:
        """Whether the blocks of `plan` are available with `headroom` blocks to spare."""
        cached = plan.cached
        if len(cached) + plan.num_new > self.pool.num_blocks:
            return AllocStatus.NEVER
        # Idle blocks of the prefix count as available; referencing them leaves fewer for the rest.
        idle = sum(map(self.pool.is_cached_idle, cached))
        enough = plan.num_new + idle + headroom <= self.pool.num_available
        return AllocStatus.OK if enough else AllocStatus.LATER

    def missing_blocks(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Blocks that each of `rows` lacks to cover its `num_tokens` tokens: int32 [len(rows)]."""
        missing: IntArray = np.maximum(-(-num_tokens // self.block_size) - self.num_blocks[rows], 0)
        return missing

    def rows_with_shared_tail(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Those of `rows` that share the block of their next token with others.

        Args:
            rows: int32 [n].
            positions: int32 [n], where each row writes its next token.
        """
        numbers = positions // self.block_size
        inside = numbers < self.num_blocks[rows]
        blocks = self.block_tables[rows, np.where(inside, numbers, 0)]
        return rows[inside & (self.pool.ref_counts[blocks] > 1)]

    def num_copies_needed(self, rows: IntArray, positions: IntArray) -> int:
        """Copies that `rows` of one request need before each may write its next token."""
        shared = self.rows_with_shared_tail(rows, positions)
        if not len(shared):
            return 0
        at = dict(zip(rows.tolist(), positions.tolist(), strict=True))
        blocks = [int(self.block_tables[row, at[row] // self.block_size]) for row in shared.tolist()]
        return self._num_copies(blocks, self.pool)

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host tier has room for the blocks of a running request."""
        blocks = {block for seq in request.live_sequences for block in self.block_table(seq)}
        return len(blocks) <= self.host_pool.num_available

    def can_swap_in(self, request: Request, headroom: int = 0) -> AllocStatus:
        """Whether a swapped request can come back and run one step, leaving `headroom` blocks."""
        sequences = request.live_sequences
        tables = [self.host_tables[seq] for seq in sequences]
        held = len({block for table in tables for block in table.tolist()})
        growth = 0
        tails = []
        for seq, table in zip(sequences, tables, strict=True):
            growth += max(0, self.blocks_for(seq.num_tokens) - len(table))
            tail = seq.num_computed_tokens // self.block_size
            if tail < len(table) and self.host_pool.ref_counts[table[tail]] > 1:
                tails.append(int(table[tail]))
        needed = held + growth + self._num_copies(tails, self.host_pool)
        if needed > self.pool.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed + headroom <= self.pool.num_available else AllocStatus.LATER

    def freed_by(self, rows: IntArray) -> IntArray:
        """Blocks that become available when all of `rows` release theirs: those that no other row references.

        Args:
            rows: int32 [n], distinct.

        Returns:
            int32 [blocks], distinct ids.
        """
        if len(rows) == 1:  # a table names no block twice
            blocks: IntArray = self.block_tables[rows[0], : self.num_blocks[rows[0]]]
            freed: IntArray = blocks[self.pool.ref_counts[blocks] == 1]
            return freed
        counts = self.num_blocks[rows]
        tables = self.block_tables[rows, : counts.max(initial=0)]
        blocks, own = np.unique(tables[np.arange(tables.shape[1]) < counts[:, None]], return_counts=True)
        freed = blocks[self.pool.ref_counts[blocks] == own]
        return freed

    def block_table(self, seq: Sequence) -> list[int]:
        """The device blocks of a running sequence, in order."""
        assert seq.row is not None
        blocks: list[int] = self.block_tables[seq.row, : self.num_blocks[seq.row]].tolist()
        return blocks

    # Commands

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate the blocks of `plan`, whose sequences already have rows.

        The caller has checked `can_allocate` in the same state. Sets each sequence's number of computed tokens
        to the length of its cached prefix.
        """
        lead = plan.sequences[0].seq
        for part in plan.sequences:  # reference all of them first, so that no cached block is evicted
            self.pool.reference(part.cached)
        for part in plan.sequences:
            seq = part.seq
            row = seq.row
            assert row is not None
            shared = self.block_table(lead)[: part.num_shared]
            self.pool.reference(shared)
            held = len(part.cached) + part.num_shared
            end = held + part.num_new
            self.block_tables[row, : len(part.cached)] = part.cached
            self.block_tables[row, len(part.cached) : held] = shared
            self.block_tables[row, held:end] = self.pool.take(part.num_new)
            self._set_num_blocks(row, end)
            self._num_indexed[row] = len(part.cached)
            self._last_entry[row] = part.last_entry
            seq.set_num_computed_tokens(len(part.cached) * self.block_size)
            seq.shares = (lead, part.num_shared * self.block_size) if part.num_shared else None
            self.num_prefix_queries += seq.num_tokens
            self.num_prefix_hits += len(part.cached) * self.block_size

    def append(self, rows: IntArray, missing: IntArray) -> None:
        """Allocate the `missing` blocks of each of the distinct `rows`; the caller ensures that there are enough.

        Args:
            rows: int32 [n].
            missing: int32 [n], at least 1 each.
        """
        blocks = self.pool.take(int(missing.sum()))
        places = self.num_blocks[rows]
        owners = rows
        if len(blocks) != len(rows):  # not one each
            owners = np.repeat(rows, missing)
            within = np.arange(len(blocks), dtype=np.int32) - np.repeat(missing.cumsum() - missing, missing)
            places = np.repeat(places, missing) + within.astype(np.int32)
        self.block_tables[owners, places] = blocks
        self._changes.append((owners, places, blocks))
        self.num_blocks[rows] += missing
        self.num_tokens_covered[rows] = self.num_blocks[rows] * self.block_size

    def take_changes(self, new_rows: list[int]) -> tuple[IntArray, IntArray, IntArray]:
        """What has changed in the block tables since the last call: rows, places and blocks, int32 [n] each.

        If a place occurs several times, its last value counts. Rows that were emptied in the meantime may occur.

        Args:
            new_rows: rows whose whole table is included.
        """
        changes, self._changes = self._changes, []
        for row in new_rows:
            count = int(self.num_blocks[row])
            blocks = self.block_tables[row, :count].copy()
            changes.append((np.full(count, row, dtype=np.int32), np.arange(count, dtype=np.int32), blocks))
        if len(changes) == 1:
            return changes[0]
        rows, places, blocks = (np.concatenate(part) for part in zip(*changes, strict=True))
        return rows, places, blocks

    @property
    def has_changes(self) -> bool:
        """Whether running rows have received blocks since the last `take_changes`."""
        return bool(self._changes)

    def copy_shared_tail(self, seq: Sequence, position: int) -> BlockPairs:
        """Copy-on-write: give `seq` a block of its own before it writes at `position`, if that block is shared.

        Returns the copies to make: none, or one pair.
        """
        row = seq.row
        assert row is not None
        number = position // self.block_size
        block = int(self.block_tables[row, number])
        if self.pool.ref_counts[block] == 1:
            return []
        (copy,) = self.pool.take(1).tolist()
        self.pool.ref_counts[block] -= 1
        self.block_tables[row, number] = copy
        change = np.array([[row], [number], [copy]], dtype=np.int32)
        self._changes.append((change[0], change[1], change[2]))
        return [(block, copy)]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all blocks of `parent` with `child`, which has a row and no blocks."""
        assert parent.row is not None
        assert child.row is not None
        blocks = self.block_table(parent)
        self.pool.reference(blocks)
        self.block_tables[child.row, : len(blocks)] = blocks
        self._set_num_blocks(child.row, len(blocks))
        self._num_indexed[child.row] = self._num_indexed[parent.row]
        self._last_entry[child.row] = self._last_entry[parent.row]

    def reassign(self, sequences: list[Sequence], parents: list[Sequence]) -> None:
        """Give each of `sequences` the blocks of its parent, all at once (beam search).

        Args:
            sequences: running sequences.
            parents: for each of them, the one whose blocks it takes over.
        """
        before = [(self.block_table(p), self._num_indexed[_row(p)], self._last_entry[_row(p)]) for p in parents]
        for blocks, _, _ in before:
            self.pool.reference(blocks)
        for seq in sequences:
            self._release(_row(seq))
        for seq, (blocks, num_indexed, last_entry) in zip(sequences, before, strict=True):
            row = _row(seq)
            self.block_tables[row, : len(blocks)] = blocks
            self._set_num_blocks(row, len(blocks))
            self._num_indexed[row], self._last_entry[row] = num_indexed, last_entry

    def trim(self, rows: IntArray, num_tokens: IntArray) -> None:
        """Free the blocks of `rows` that hold none of their `num_tokens` tokens (they held rejected drafts)."""
        needed = -(-num_tokens // self.block_size)
        for i in np.flatnonzero(needed < self.num_blocks[rows]).tolist():
            row, keep = int(rows[i]), int(needed[i])
            surplus = self.block_tables[row, keep : self.num_blocks[row]][::-1].copy()
            self.pool.release(surplus, is_cached=self._is_indexed)
            self._set_num_blocks(row, keep)

    def index_computed(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks within the first `num_tokens` tokens of a running sequence findable.

        The KV of these tokens must be written.
        """
        row = seq.row
        if self.index is None or row is None:
            return
        first, end = self._num_indexed[row], num_tokens // self.block_size
        if end <= first:
            return
        parent = self._last_entry[row]
        contents = self._contents(seq, first, end)
        for content, block in zip(contents, self.block_tables[row, first:end].tolist(), strict=True):
            parent = self.index.add(BlockKey(parent, *content), block).entry_id
        self._num_indexed[row], self._last_entry[row] = end, parent

    def free(self, seq: Sequence) -> None:
        """Free all blocks of a running sequence, after making its full blocks findable.

        Its last blocks are reused first, so that prefixes stay findable longest.
        """
        self.index_computed(seq, seq.num_computed_tokens)
        self._release(_row(seq))

    def swap_out(self, request: Request) -> BlockPairs:
        """Move the blocks of a running request to the host tier; the caller has checked `can_swap_out`.

        Returns the copies to make as (device block, host block).
        """
        sequences = request.live_sequences
        tables = [self.block_table(seq) for seq in sequences]
        target = self._take_copies(tables, self.host_pool)
        for seq, table in zip(sequences, tables, strict=True):
            self.host_tables[seq] = np.array([target[block] for block in table], dtype=np.int32)
            self.free(seq)
        return list(target.items())

    def swap_in(self, request: Request) -> BlockPairs:
        """Move the blocks of a swapped request, whose sequences already have rows, back to the device tier.

        The caller has checked `can_swap_in`. Returns the copies to make as (host block, device block).
        """
        sequences = request.live_sequences
        tables = [self.host_tables[seq].tolist() for seq in sequences]
        target = self._take_copies(tables, self.pool)
        for seq, table in zip(sequences, tables, strict=True):
            row = _row(seq)
            self.block_tables[row, : len(table)] = [target[block] for block in table]
            self._set_num_blocks(row, len(table))
            self._num_indexed[row], self._last_entry[row] = 0, ROOT
            self.free_host(seq)
        return list(target.items())

    def free_host(self, seq: Sequence) -> None:
        """Free all host blocks of a swapped sequence."""
        self.host_pool.release(self.host_tables.pop(seq), is_cached=_never_cached)

    # Internals

    def _find_prefix(self, seq: Sequence) -> tuple[tuple[int, ...], int]:
        """The longest cached prefix of a sequence: its blocks, and the entry of the last one.

        The last token is never taken from the cache, because its logits are needed. A request for prompt
        logprobs takes nothing, because it needs the logits of the whole prompt.
        """
        blocks: list[int] = []
        parent = ROOT
        if self.index is not None and seq.request.sampling_params.prompt_logprobs is None:
            for content in self._contents(seq, 0, (seq.num_tokens - 1) // self.block_size):
                entry = self.index.find(BlockKey(parent, *content))
                if entry is None:
                    break
                blocks.append(entry.block)
                parent = entry.entry_id
        return tuple(blocks), parent

    def _take_copies(self, tables: Iterable[list[int]], pool: BlockPool) -> dict[int, int]:
        """Allocate from `pool` a block for each distinct block of `tables`, with as many references."""
        tables = list(tables)
        distinct = list(dict.fromkeys(block for table in tables for block in table))
        target = dict(zip(distinct, pool.take(len(distinct)).tolist(), strict=True))
        for block in distinct:
            pool.ref_counts[target[block]] = sum(block in table for table in tables)
        return target

    @staticmethod
    def _num_copies(tails: list[int], pool: BlockPool) -> int:
        """Copies that writers into shared blocks need: each writer but the last holder of a block gets one."""
        counts: dict[int, int] = {}
        for block in tails:
            counts[block] = counts.get(block, 0) + 1
        return sum(n - (pool.ref_counts[block] == n) for block, n in counts.items())

    def _set_num_blocks(self, row: int, count: int) -> None:
        self.num_blocks[row] = count
        self.num_tokens_covered[row] = count * self.block_size

    def _release(self, row: int) -> None:
        blocks = self.block_tables[row, : self.num_blocks[row]][::-1].copy()
        self.pool.release(blocks, is_cached=self._is_indexed)
        self._set_num_blocks(row, 0)
        self._num_indexed[row] = 0
        self._last_entry[row] = ROOT

    def _contents(self, seq: Sequence, first: int, end: int) -> Iterator[tuple[bytes, Namespace]]:
        """Tokens and namespace of blocks `first` to `end` - 1 of a sequence, without the parent."""
        size = self.block_size
        tokens = seq.token_ids[first * size : end * size].tobytes()
        namespace = seq.request.cache_namespace
        width = size * seq.token_ids.itemsize
        return ((tokens[i : i + width], namespace) for i in range(0, len(tokens), width))


def _row(seq: Sequence) -> int:
    assert seq.row is not None
    return seq.row


def _never(block: int) -> None:
    raise AssertionError(f"block {block} was cached in a tier without a prefix index")


def _never_cached(block: int) -> bool:
    return False
