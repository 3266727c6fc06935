"""The built-in victim policies."""

from collections.abc import Iterable

from treadle.scheduler.policies.base import RequestView, VictimPolicy


class LastInRank(VictimPolicy):
    """The last request in rank first."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """Return the candidates unchanged: they come last in rank first."""
        return candidates


class LeastComputed(VictimPolicy):
    """The request with the fewest computed tokens first, which loses the least work; of equals, the last in rank."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """Return the candidates sorted by their number of computed tokens."""
        return sorted(candidates, key=lambda request: request.num_computed_tokens)
