"""Who goes first. Those that keep accounts have a file each."""

from treadle.scheduler.policies.base import MAX_RERANKED, Moment, QueueOrder, RequestView


class FirstComeFirstServed(QueueOrder):
    """In the order of arrival."""

    is_by_arrival = True

    def key(self, request: RequestView) -> float:
        """The same for all."""
        return 0.0


class Priority(QueueOrder):
    """The lowest `priority` first; a running request makes room for a waiting one of strictly better priority."""

    displaces = True

    def key(self, request: RequestView) -> float:
        """The number given."""
        return float(request.priority)


class ShortestFirst(QueueOrder):
    """The shortest prompt first. The age limit keeps long ones from waiting for ever."""

    def key(self, request: RequestView) -> float:
        """The prompt's length."""
        return float(request.num_prompt_tokens)


class Deadline(QueueOrder):
    """The earliest deadline first; those without one last."""

    def key(self, request: RequestView) -> float:
        """The time by which it should be done."""
        return request.deadline


class CacheAware(QueueOrder):
    """The longest cached prefix first, as in SGLang: what the cache holds is used before it is reused.

    Asked again whenever the cache has changed, as long as at most MAX_RERANKED requests wait. The age limit keeps
    those without a prefix from waiting for ever.
    """

    changes_while_waiting = True

    def __init__(self) -> None:
        self._cache_version = 0

    def key(self, request: RequestView) -> float:
        """The length of the cached prefix, longest first."""
        return -float(request.count_cached_tokens())

    def is_stale(self, moment: Moment) -> bool:
        """Whether the cache has changed since all were asked."""
        if moment.cache_version == self._cache_version or moment.num_waiting > MAX_RERANKED:
            return False
        self._cache_version = moment.cache_version
        return True
