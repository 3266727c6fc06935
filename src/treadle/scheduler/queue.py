"""A queue in rank order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from treadle.core.request import Rank, Request


def _rank(request: Request) -> Rank:
    return request.rank


class RankedQueue:
    """Requests in rank order, smallest first.

    A sorted list rather than a heap: what is preempted returns to its place, anybody can be aborted, and
    observers read the whole queue in order.

    Attributes:
        num_prompt_tokens: length of all prompts in the queue.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self) -> Request | None:
        """The request whose turn it is."""
        return self._requests[0] if self._requests else None

    def after(self, request: Request) -> Request | None:
        """The one behind `request`."""
        place = self._place(request) + 1
        return self._requests[place] if place < len(self._requests) else None

    def add(self, request: Request) -> None:
        """Put `request` at its rank."""
        insort(self._requests, request, key=_rank)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Take `request` out; it must be in the queue."""
        del self._requests[self._place(request)]
        self.num_prompt_tokens -= len(request.prompt_token_ids)

    def change_ranks(self, ranks: Mapping[Request, Rank]) -> None:
        """Give requests of the queue, all or some of them, other ranks."""
        for request, rank in ranks.items():
            request.rank = rank
        self._requests.sort(key=_rank)

    def _place(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=_rank)
