"""Requests that have waited too long go first."""

import heapq

from treadle.core.request import Request, RequestStatus
from treadle.scheduler import lifecycle
from treadle.scheduler.state import SchedulerState


class Ageing:
    """Moves a request that has waited longer than the age limit before all that have not, once.

    A request also waits while its prompt is partly computed. Under an order by arrival nobody has to move: all that
    are before it have waited longer.

    Args:
        limit_s: the age limit in seconds; None for none.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # (time at which a request ages, arrival number, request): a heap.
        self._due: list[tuple[float, int, Request]] = []

    def watch(self, request: Request) -> None:
        """The request has begun to wait, at its `waiting_since`."""
        if self._limit_s is not None and not request.is_aged:
            due = request.waiting_since + self._limit_s
            heapq.heappush(self._due, (due, request.arrival_number, request))

    def apply(self, state: SchedulerState) -> None:
        """Give those who are due their new rank; among them the one that arrived first goes first."""
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
