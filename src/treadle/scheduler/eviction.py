"""Selects the requests to preempt for another request: as few as make enough room, or none if all would not.

The functions of this module change no state, apart from a remembered refusal (`vain_displacement`).
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
    """Select running requests strictly behind `request` whose preemption frees `num_missing` blocks.

    Args:
        state: the scheduler's state.
        request: the request that lacks blocks.
        num_missing: number of blocks that it lacks, at least 1.
        is_planned: bool [rows], the rows that are in the step already and cannot be preempted; None for no rows.

    Returns:
        The victims; empty if preempting all candidates would not free enough blocks.
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
    """Select running requests of strictly worse priority whose preemption lets the waiting `request` start.

    Returns:
        The victims; empty if `request` can start without a preemption, or if preempting all candidates would not
        free enough seats and blocks.
    """
    kv, batch = state.kv, state.batch
    worse: Rank = (1, state.policies.key(request) if request.is_aged else request.rank[1], sys.maxsize)
    rows = batch.rows_behind(worse)
    if not len(rows) or guards.lacks_adapter(state, request) or guards.is_behind_swapped(state, request):
        return []  # an adapter slot becomes free only when the requests of another adapter end
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
    """Select as few of `candidates` as suffice, preferring the first ones; none if all of them do not suffice.

    Args:
        candidates: the requests that may be preempted, in the order of preference.
        suffices: whether preempting the given requests makes enough room. Must be monotonic: if a list suffices,
            any longer list that contains it does.
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
    # The last one is needed. Each of the others may be redundant, for instance because it frees no block.
    for candidate in chosen[-2::-1]:
        others = [other for other in chosen if other is not candidate]
        if suffices(others):
            chosen = others
    return chosen


def _has_room(
    state: SchedulerState, request: Request, plan: AllocationPlan, victims: list[Request], growth: int
) -> bool:
    """Whether `request` finds seats and blocks once `victims` are gone and decodes have taken `growth` blocks."""
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
    """Return how many new blocks the running sequences, except the rows `without`, need for their next decode."""
    kv, batch = state.kv, state.batch
    rows = batch.decoding_rows()
    rows = rows[~np.isin(rows, without)]
    missing = int(kv.missing_blocks(rows, batch.num_tokens[rows]).sum())
    return missing + (kv.num_copies_needed(rows, batch.num_computed_tokens[rows]) if batch.num_groups else 0)


def _rows(requests: list[Request]) -> IntArray:
    return rows_of(seq for request in requests for seq in request.live_sequences)
