"""Ageing: requests that have waited longer than the age limit go first."""

import heapq

from treadle.core.request import Request, RequestStatus
from treadle.scheduler import lifecycle
from treadle.scheduler.state import SchedulerState


class Ageing:
    """Moves a request, once, ahead of all younger requests when it has waited longer than the age limit.

    A request with a partly computed prompt still counts as waiting. An order by arrival needs no move, because
    the requests ahead have waited even longer.

    Args:
        limit_s: the age limit in seconds; None disables ageing.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # A heap of (time at which the request reaches the age limit, arrival number, request).
        self._due: list[tuple[float, int, Request]] = []

    def watch(self, request: Request) -> None:
        """Start to watch a request that has been waiting since its `waiting_since`."""
        if self._limit_s is not None and not request.is_aged:
            due = request.waiting_since + self._limit_s
            heapq.heappush(self._due, (due, request.arrival_number, request))

    def apply(self, state: SchedulerState) -> None:
        """Move every request that has reached the age limit to the front; aged requests keep their arrival order."""
        if not self._due or self._limit_s is None:
            return
        now = state.clock.now()
        while self._due and self._due[0][0] <= now:
            due, _, request = heapq.heappop(self._due)
            has_run_since = request.waiting_since + self._limit_s > due
            if request.is_aged or has_run_since or not _waits(state, request):
                continue
            request.is_aged = True
            if not state.policies.is_by_arrival:
                lifecycle.change_rank(state, request, (0, 0.0, request.arrival_number))


def _waits(state: SchedulerState, request: Request) -> bool:
    if request.status is RequestStatus.RUNNING:
        return any(bool(state.batch.is_prefilling[seq.row]) for seq in request.live_sequences)
    return not request.is_finished
