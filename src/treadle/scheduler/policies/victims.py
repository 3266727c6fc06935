"""Who is preempted first."""

from collections.abc import Iterable

from treadle.scheduler.policies.base import RequestView, VictimPolicy


class LastInRank(VictimPolicy):
    """The last in rank: those that the order likes least."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """As they come."""
        return candidates


class LeastComputed(VictimPolicy):
    """The one that has the fewest tokens computed, and so loses the least work; of equal ones the last in rank."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """By computed tokens."""
        return sorted(candidates, key=lambda request: request.num_computed_tokens)
