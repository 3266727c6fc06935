"""Who is preempted for a request: as few as make the room that it needs, or none at all.

Nothing here changes anything.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np

from treadle.core.request import IntArray, Rank, Request
from treadle.kvcache import AllocationPlan, AllocStatus
from treadle.scheduler import guards
from treadle.scheduler.batch import BoolArray, rows_of
from treadle.scheduler.state import BlockRefusal, SchedulerState


def victims_to_grow(
    state: SchedulerState, request: Request, num_missing: int, is_planned: BoolArray | None
) -> list[Request]:
    """Running requests strictly behind `request` that have to go so that `num_missing` blocks become available.

    Args:
        state: of the scheduler.
        request: who lacks blocks.
        num_missing: how many, at least 1.
        is_planned: bool [rows], rows that are in the step already and have to stay; None for no rows.

    Returns:
        Who has to go; nobody if all of them together would not free as many blocks.
    """
    kv, batch = state.kv, state.batch

    def candidates() -> Iterator[Request]:
        for other in batch.requests_behind(request.rank):
            if is_planned is None or not is_planned[_rows([other])].any():
                yield other

    for victim in state.policies.victims(candidates()):
        num_freed = len(kv.freed_by(_rows([victim])))
        if num_freed >= num_missing:
            return [victim]
        if num_freed:
            break
    behind = batch.rows_behind(request.rank) if is_planned is None else _rows(list(candidates()))
    if len(kv.freed_by(behind)) < num_missing:
        return []
    in_order = list(state.policies.victims(candidates()))
    return fewest(in_order, lambda victims: len(kv.freed_by(_rows(victims))) >= num_missing)


def victims_to_admit(state: SchedulerState, request: Request) -> list[Request]:
    """Running requests of strictly worse priority that have to go so that `request`, which waits, can start.

    Empty if it can start without, or if all of them together would not free enough seats and blocks.
    """
    kv, batch = state.kv, state.batch
    worse: Rank = (1, state.policies.key(request) if request.is_aged else request.rank[1], sys.maxsize)
    rows = batch.rows_behind(worse)
    if not len(rows) or guards.lacks_adapter(state, request) or guards.is_behind_swapped(state, request):
        return []  # an adapter's room comes with the end of other adapters' requests
    total = BlockRefusal(
        request, kv.num_available_blocks + len(kv.freed_by(rows)), len(batch) - len(rows), kv.version
    )
    if guards.is_no_better(total, state.vain_displacement):
        return []
    plan = kv.plan_allocation(request)
    if kv.can_allocate(plan) is AllocStatus.NEVER:
        return []
    candidates = list(state.policies.victims(batch.requests_behind(worse)))
    if not _has_room(state, request, plan, candidates, growth=0):
        state.vain_displacement = total
        return []

    def suffices(victims: list[Request]) -> bool:
        return _has_room(state, request, plan, victims, _growth(state, without=_rows(victims)))

    return [] if suffices([]) else fewest(candidates, suffices)


def fewest(candidates: list[Request], suffices: Callable[[list[Request]], bool]) -> list[Request]:
    """As few of `candidates` as suffice, the first ones first; none if all of them do not.

    Args:
        candidates: who may go, in the order in which they should.
        suffices: whether the room is there when these go; true of more where it is true of fewer.
    """
    if not suffices(candidates):
        return []
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if suffices(candidates[:middle]):
            high = middle
        else:
            low = middle + 1
    chosen = candidates[:low]
    # The last one is needed. Those before it may free nothing that the others do not free as well.
    for candidate in chosen[-2::-1]:
        others = [other for other in chosen if other is not candidate]
        if suffices(others):
            chosen = others
    return chosen


def _has_room(
    state: SchedulerState, request: Request, plan: AllocationPlan, victims: list[Request], growth: int
) -> bool:
    """Whether `request` has seats and blocks once `victims` are gone and decodes have taken `growth` blocks."""
    kv, batch = state.kv, state.batch
    num_seats = sum(len(victim.live_sequences) + victim.num_reserved_seats for victim in victims)
    if batch.num_free_seats + num_seats < request.num_seats:
        return False
    rows = _rows(victims)
    freed = set(kv.freed_by(rows).tolist())
    idle = sum(kv.pool.is_cached_idle(block) or block in freed for block in plan.cached)
    headroom = guards.headroom(state, request, len(batch) - len(rows))
    return plan.num_new + idle + headroom + growth <= kv.num_available_blocks + len(freed)


def _growth(state: SchedulerState, without: IntArray) -> int:
    """Blocks that the running sequences take in order to decode, but for the rows in `without`."""
    kv, batch = state.kv, state.batch
    rows = batch.decoding_rows()
    rows = rows[~np.isin(rows, without)]
    missing = int(kv.missing_blocks(rows, batch.num_tokens[rows]).sum())
    return missing + (kv.num_copies_needed(rows, batch.num_computed_tokens[rows]) if batch.num_groups else 0)


def _rows(requests: list[Request]) -> IntArray:
    return rows_of(seq for request in requests for seq in request.live_sequences)
