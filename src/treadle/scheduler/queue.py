"""A queue in rank order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from treadle.request import Rank, Request


def _rank(request: Request) -> Rank:
    return request.rank


class RankedQueue:
    """Requests in rank order, smallest first.

    A sorted list rather than a heap: what is preempted returns to its place, anybody can be aborted, and
    observers read the whole queue in order.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self) -> Request | None:
        """The request whose turn it is."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """Put `request` at its rank."""
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take `request` out; it must be in the queue."""
        del self._requests[bisect_left(self._requests, request.rank, key=_rank)]
