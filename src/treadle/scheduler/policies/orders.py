"""Who goes first."""

from treadle.request import Request


class FirstComeFirstServed:
    """In the order of arrival."""

    displaces = False
    is_by_arrival = True

    def key(self, request: Request) -> float:
        """The same for all."""
        return 0.0

    def admitted(self, request: Request) -> None:
        """Nothing to note."""


class Priority(FirstComeFirstServed):
    """The lowest `priority` first; a running request makes room for a waiting one of strictly better priority."""

    is_by_arrival = False
    displaces = True

    def key(self, request: Request) -> float:
        """The number given."""
        return float(request.priority)


class ShortestFirst(FirstComeFirstServed):
    """The shortest prompt first. The age limit keeps long ones from waiting for ever."""

    is_by_arrival = False

    def key(self, request: Request) -> float:
        """The prompt's length."""
        return float(len(request.prompt_token_ids))


class Deadline(FirstComeFirstServed):
    """The earliest deadline first; those without one last."""

    is_by_arrival = False

    def key(self, request: Request) -> float:
        """The time by which it should be done."""
        return request.deadline


class Fair(FirstComeFirstServed):
    """Tenants take turns by the tokens that they ask for: start-time fair queueing (Goyal, Vin and Cheng 1996).

    A request's start tag is where its tenant's last one ends on a virtual clock, or the clock's present time
    if that is later; it ends its prompt's length plus `max_tokens` further on. The clock shows the start tag
    of the request that was admitted last. So a tenant that sends much queues behind itself, and one that
    was idle saves up nothing.
    """

    is_by_arrival = False

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def key(self, request: Request) -> float:
        """The start tag."""
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        cost = len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0)
        self._ends[request.tenant] = start + cost * request.sampling_params.n
        return start

    def admitted(self, request: Request) -> None:
        """The virtual clock goes on to the request's start tag; tenants that it has passed are forgotten."""
        self._now = max(self._now, request.rank[1])
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
