"""A queue of requests in rank order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from treadle.core.request import Rank, Request


def _rank(request: Request) -> Rank:
    return request.rank


class RankedQueue:
    """Requests in rank order, smallest rank first.

    A sorted list rather than a heap: preempted requests return to their place, any request can be aborted, and
    observers read the whole queue in order.

    Attributes:
        num_prompt_tokens: total length of the prompts in the queue.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self) -> Request | None:
        """The first request in rank order; None if the queue is empty."""
        return self._requests[0] if self._requests else None

    def after(self, request: Request) -> Request | None:
        """The request directly behind `request`; None if `request` is the last one."""
        place = self._place(request) + 1
        return self._requests[place] if place < len(self._requests) else None

    def add(self, request: Request) -> None:
        """Insert `request` at its place in rank order."""
        insort(self._requests, request, key=_rank)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Remove `request`, which must be in the queue."""
        del self._requests[self._place(request)]
        self.num_prompt_tokens -= len(request.prompt_token_ids)

    def change_ranks(self, ranks: Mapping[Request, Rank]) -> None:
        """Change the ranks of some or all requests in the queue and restore the rank order."""
        for request, rank in ranks.items():
            request.rank = rank
        self._requests.sort(key=_rank)

    def _place(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=_rank)
