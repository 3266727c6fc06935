"""What must hold after every step. Tests check it all the time, and the engine on request."""

from collections import Counter

from treadle.errors import EngineError
from treadle.request import RequestStatus
from treadle.scheduler.plan import StepPlan
from treadle.scheduler.scheduler import Scheduler


class InvariantViolation(EngineError):  # noqa: N818 - it is the scheduler's fault, not the caller's
    """The scheduler or the cache is in a state that must not be."""


def check_invariants(scheduler: Scheduler, plan: StepPlan | None = None) -> None:
    """Raise InvariantViolation unless queues, rows, block tables and pool agree with each other.

    Args:
        scheduler: between steps, or between `schedule` and `update`.
        plan: the step just planned, to check against budget and seats too.
    """
    _check_blocks(scheduler)
    _check_queues(scheduler)
    if plan is not None:
        _check_plan(scheduler, plan)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _check_blocks(scheduler: Scheduler) -> None:
    kv, batch = scheduler.kv, scheduler.batch
    tables = {seq: kv.block_table(seq.row) for seq in batch.running_sequences() if seq.row is not None}
    references = Counter(block for table in tables.values() for block in table)
    counts = kv.pool.ref_counts.tolist()
    for block, count in enumerate(counts):
        _require(
            count == references[block],
            f"block {block} counts {count} references, tables have {references[block]}",
        )
    free = kv.pool.free_block_ids()
    _require(len(set(free)) == len(free), "a block is on the free stack twice")
    idle = [block for block in range(kv.pool.num_blocks) if kv.pool.is_cached_idle(block)]
    _require(not set(free) & set(idle), "a block is both free and cached-idle")
    _require(all(counts[block] == 0 for block in free + idle), "a block is both available and referenced")
    _require(
        len(free) + len(idle) + len(references) == kv.pool.num_blocks, "free + cached-idle + referenced ≠ all"
    )
    _require(kv.pool.num_available == len(free) + len(idle), "num_available is wrong")
    if kv.index is not None:
        findable = set(kv.index.blocks())
        _require(len(findable) == len(kv.index), "the prefix index has entries without a block of their own")
        _require(set(idle) <= findable, "a cached-idle block cannot be found")
        _require(not set(free) & findable, "a free block can be found")
    for seq, table in tables.items():
        _require(seq.num_computed_tokens <= seq.num_tokens, f"{seq}: more computed than known")
        _require(
            len(table) * kv.block_size >= seq.num_computed_tokens, f"{seq}: blocks do not cover computed"
        )
        _require(len(set(table)) == len(table), f"{seq}: a block is in the table twice")


def _check_queues(scheduler: Scheduler) -> None:
    batch = scheduler.batch
    running = batch.running_sequences()
    waiting = list(scheduler.waiting)
    _require(
        sorted(map(id, waiting + [seq.request for seq in running]))
        == sorted(map(id, scheduler.unfinished_requests())),
        "an unfinished request is not in exactly one queue",
    )
    _require(all(r.status is RequestStatus.WAITING for r in waiting), "a waiting request says otherwise")
    _require(
        all(s.request.status is RequestStatus.RUNNING for s in running), "a running request says otherwise"
    )
    ranks = [r.rank for r in waiting]
    _require(ranks == sorted(ranks), "waiting is not in rank order")
    ranks = [s.request.rank for s in running]
    _require(ranks == sorted(ranks), "running is not in rank order")
    _require(len({s.row for s in running}) == len(running), "two sequences share a row")
    _require(
        [batch.sequences[s.row] for s in running if s.row is not None] == running,
        "a row does not hold its sequence",
    )
    _require(len(running) + batch.num_free_rows == scheduler.config.max_num_seqs, "rows were lost")
    if not running and not waiting:
        _require(
            scheduler.kv.num_available_blocks == scheduler.kv.pool.num_blocks, "blocks are held by nobody"
        )


def _check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    config, kv, batch = scheduler.config, scheduler.kv, scheduler.batch
    rows = [s.row for s in plan.sequences] + plan.decode_rows.tolist()
    _require(len(set(rows)) == len(rows), "a sequence is in the step twice")
    _require(len(rows) <= config.max_num_seqs, "more sequences than seats")
    _require(plan.num_batched_tokens <= config.max_num_batched_tokens, "more tokens than budget")
    _require(not plan.is_empty or bool(plan.preempted) or not rows, "the step runs nothing")
    for scheduled in plan.sequences:
        seq = batch.sequences[scheduled.row]
        _require(scheduled.start == seq.num_computed_tokens, f"{seq}: scheduled from {scheduled.start}")
        _require(scheduled.count > 0, f"{seq}: scheduled without tokens")
        end = scheduled.start + scheduled.count
        _require(end <= seq.num_tokens, f"{seq}: scheduled beyond its tokens")
        _require(scheduled.num_samples == int(end == seq.num_tokens), f"{seq}: samples at the wrong place")
        _require(end <= len(kv.block_table(scheduled.row)) * kv.block_size, f"{seq}: scheduled beyond blocks")
    for row in plan.decode_rows.tolist():
        seq = batch.sequences[row]
        _require(seq.num_computed_tokens == seq.num_tokens - 1, f"{seq}: decodes with tokens missing")
        _require(
            seq.num_tokens <= len(kv.block_table(row)) * kv.block_size, f"{seq}: decodes beyond its blocks"
        )
    written = [
        kv.block_table(row)[position // kv.block_size]
        for row, position in [(s.row, s.start + i) for s in plan.sequences for i in range(s.count)]
        + [(row, batch.sequences[row].num_computed_tokens) for row in plan.decode_rows.tolist()]
    ]
    _require(all(kv.pool.ref_counts[block] == 1 for block in written), "a shared block would be written to")
