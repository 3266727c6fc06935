"""Queue orders with little or no state. The other orders have a file each."""

from treadle.scheduler.policies.base import MAX_RERANKED, Moment, QueueOrder, RequestView


class FirstComeFirstServed(QueueOrder):
    """In order of arrival."""

    is_by_arrival = True

    def key(self, request: RequestView) -> float:
        """Return the same key for all requests."""
        return 0.0


class Priority(QueueOrder):
    """The lowest `priority` first. Running requests may be preempted for one of strictly better priority."""

    displaces = True

    def key(self, request: RequestView) -> float:
        """Return the priority."""
        return float(request.priority)


class ShortestFirst(QueueOrder):
    """The shortest prompt first. The age limit prevents the starvation of long prompts."""

    def key(self, request: RequestView) -> float:
        """Return the length of the prompt."""
        return float(request.num_prompt_tokens)


class Deadline(QueueOrder):
    """The earliest deadline first; requests without a deadline last."""

    def key(self, request: RequestView) -> float:
        """Return the deadline."""
        return request.deadline


class CacheAware(QueueOrder):
    """The longest cached prefix first, as in SGLang, so that cached blocks are used before they are evicted.

    Keys are computed again whenever the cache has changed, while at most MAX_RERANKED requests wait. The age limit
    prevents the starvation of requests without a cached prefix.
    """

    changes_while_waiting = True

    def __init__(self) -> None:
        self._cache_version = 0

    def key(self, request: RequestView) -> float:
        """Return the negative length of the cached prefix."""
        return -float(request.count_cached_tokens())

    def is_stale(self, moment: Moment) -> bool:
        """Whether the cache has changed since the keys were computed."""
        if moment.cache_version == self._cache_version or moment.num_waiting > MAX_RERANKED:
            return False
        self._cache_version = moment.cache_version
        return True
