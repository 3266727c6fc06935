"""The invariants that hold after every step. Tests check them always, the engine with `--check-invariants`."""

from collections import Counter

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.request import RequestStatus, Sequence
from treadle.kvcache import BlockPool
from treadle.scheduler.plan import StepPlan
from treadle.scheduler.scheduler import Scheduler


class InvariantViolation(EngineError):  # noqa: N818 - it is the scheduler's fault, not the caller's
    """The scheduler or the KV cache is in an inconsistent state."""


def check_invariants(scheduler: Scheduler, plan: StepPlan | None = None) -> None:
    """Raise InvariantViolation unless queues, rows, block tables and pools agree with each other.

    Args:
        scheduler: a scheduler between steps, or between `schedule` and `update`.
        plan: the step just planned, if any; it is checked against the token budget and the seats.
    """
    kv = scheduler.kv
    tables = {seq: kv.block_table(seq) for seq in scheduler.batch.running_sequences()}
    _check_pool("device", kv.pool, tables)
    host_tables = {seq: table.tolist() for seq, table in kv.host_tables.items()}
    _check_pool("host", kv.host_pool, host_tables)
    _check_index(scheduler)
    for seq, table in [*tables.items(), *host_tables.items()]:
        _check_sequence(seq, table, kv.block_size)
    _check_queues(scheduler)
    if plan is not None:
        _check_plan(scheduler, plan, tables)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _check_pool(name: str, pool: BlockPool, tables: dict[Sequence, list[int]]) -> None:
    references = Counter(block for table in tables.values() for block in table)
    counts = pool.ref_counts.tolist()
    if counts != [references.get(block, 0) for block in range(pool.num_blocks)]:
        block = next(block for block, count in enumerate(counts) if count != references[block])
        raise InvariantViolation(
            f"{name} block {block} counts {counts[block]} references, tables have {references[block]}"
        )
    free = pool.free_block_ids()
    _require(len(set(free)) == len(free), f"a {name} block is on the free stack twice")
    idle = pool.cached_idle_block_ids()
    _require(not set(free) & set(idle), f"a {name} block is both free and cached-idle")
    _require(all(counts[block] == 0 for block in free + idle), f"a {name} block is both available and referenced")
    _require(
        len(free) + len(idle) + len(references) == pool.num_blocks,
        f"{name} tier: free + cached-idle + referenced are not all",
    )
    _require(pool.num_available == len(free) + len(idle), f"{name} tier: num_available is wrong")


def _check_index(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    if kv.index is None:
        return
    findable = set(kv.index.blocks())
    _require(len(findable) == len(kv.index), "the prefix index has entries without a block of their own")
    _require(findable.issuperset(kv.pool.cached_idle_block_ids()), "a cached-idle block cannot be found")
    _require(not set(kv.pool.free_block_ids()) & findable, "a free block can be found")


def _check_sequence(seq: Sequence, table: list[int], block_size: int) -> None:
    _require(seq.num_computed_tokens <= seq.num_tokens, f"{seq}: more computed than known")
    _require(len(table) * block_size >= seq.num_computed_tokens, f"{seq}: blocks do not cover computed")
    _require(len(set(table)) == len(table), f"{seq}: a block is in the table twice")


def _check_queues(scheduler: Scheduler) -> None:
    batch, kv = scheduler.batch, scheduler.kv
    running = batch.running_requests()
    waiting, swapped = list(scheduler.waiting), list(scheduler.swapped)
    _require(
        sorted(map(id, waiting + swapped + running)) == sorted(map(id, scheduler.unfinished_requests())),
        "an unfinished request is not in exactly one queue",
    )
    for queue, status in (
        (waiting, RequestStatus.WAITING),
        (swapped, RequestStatus.SWAPPED),
        (running, RequestStatus.RUNNING),
    ):
        ranks = [request.rank for request in queue]
        _require(ranks == sorted(ranks), f"{status.value} is not in rank order")
        _require(all(r.status is status for r in queue), f"a request in {status.value} has another status")
    sequences = batch.running_sequences()
    _require(
        set(sequences) == {seq for request in running for seq in request.live_sequences},
        "a running request has a sequence without a row, or a finished one with a row",
    )
    _require(
        set(kv.host_tables) == {seq for request in swapped for seq in request.live_sequences},
        "host blocks are held by a sequence that is not swapped",
    )
    _require(
        all(seq.row is not None and batch.sequences[seq.row] is seq for seq in sequences),
        "a row does not hold its sequence",
    )
    reserved = sum(request.num_seats - len(request.live_sequences) for request in running)
    _require(reserved >= 0, "a request has more sequences than seats")
    _require(len(sequences) + reserved + batch.num_free_seats == scheduler.config.max_num_seqs, "seats were lost")
    _require(batch.num_free_seats >= 0, "more sequences than seats")
    _require(
        batch.num_prefilling == sum(bool(batch.is_prefilling[row]) for row in batch.rows.tolist()),
        "num_prefilling is wrong",
    )
    adapters = {request.lora.lora_int_id for request in running if request.lora is not None}
    _require(len(adapters) <= scheduler.config.max_loras, "more adapters than max_loras run")
    if not running:
        _require(
            kv.num_available_blocks == kv.pool.num_blocks, "device blocks are in use although no request is running"
        )
    if not swapped:
        _require(
            kv.host_pool.num_available == kv.host_pool.num_blocks,
            "host blocks are in use although no request is swapped",
        )


def _check_plan(scheduler: Scheduler, plan: StepPlan, tables: dict[Sequence, list[int]]) -> None:
    config, kv, batch = scheduler.config, scheduler.kv, scheduler.batch
    rows = plan.rows.tolist()
    num_ahead = len(plan.drafts)
    num_known = plan.num_prefills + plan.num_decodes
    decoded = plan.counts[plan.num_prefills : num_known]
    _require(len(set(rows)) == len(rows), "a sequence is in the step twice")
    _require(len(rows) <= config.max_num_seqs, "more sequences than seats")
    _require(plan.num_batched_tokens <= config.max_num_batched_tokens, "more tokens than budget")
    _require(not plan.moves.swap_out or not plan.moves.swap_in, "swap-out and swap-in share a step")
    _require(int(decoded.sum()) == len(decoded) + num_ahead, "drafts and counts do not agree")
    candidates = np.zeros(len(rows), dtype=np.int32) if plan.candidates is None else plan.candidates
    entries = zip(rows, plan.starts.tolist(), plan.counts.tolist(), (plan.samples + candidates).tolist(), strict=True)
    writes: list[tuple[Sequence, int]] = []
    for i, (row, start, count, asks) in enumerate(entries):
        seq = batch.sequences[row]
        _require(seq is not None, f"row {row} is scheduled and empty")
        _require(start == seq.num_computed_tokens, f"{seq}: scheduled from {start}")
        _require(count > 0, f"{seq}: scheduled without tokens")
        end = start + count
        if i < plan.num_prefills:
            _require(end <= seq.num_tokens, f"{seq}: scheduled beyond its tokens")
        else:
            _require(start == seq.num_tokens - 1, f"{seq}: decodes with tokens missing")
            _require(end <= batch.token_limits[row], f"{seq}: more drafts than tokens may come")
        _require(bool(asks) == (end >= seq.num_tokens), f"{seq}: samples at the wrong place")
        _require(seq.shares is None, f"{seq}: scheduled before what it shares is computed")
        writes += [(seq, position) for position in range(start, end)]
    for seq, position in writes:
        number = position // kv.block_size
        _require(number < len(tables[seq]), f"{seq}: scheduled beyond its blocks")
        # Sequences that wait for this one to compute the tokens they share do not read the block yet.
        waiting = sum(
            other.shares is not None and other.shares[0] is seq and position < other.shares[1]
            for other in seq.request.live_sequences
        )
        _require(kv.pool.ref_counts[tables[seq][number]] == 1 + waiting, f"{seq}: would write to a shared block")
