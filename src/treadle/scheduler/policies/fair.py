"""Tenants take turns by the tokens that they use."""

from dataclasses import dataclass
from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import MAX_RERANKED, Moment, QueueOrder, RequestView


@dataclass(slots=True)
class Charge:
    """What an unfinished request has been charged.

    Attributes:
        earliest: the virtual time at which it arrived.
        start: its start tag.
        cost: tokens of its prompt, and of all the outputs that it may have.
        is_admitted: whether it has run.
    """

    earliest: float
    start: float
    cost: float
    is_admitted: bool = False


class Fair(QueueOrder):
    """Start-time fair queueing (Goyal, Vin and Cheng 1996) with real charges.

    A request's start tag is where its tenant's last one ends on a virtual clock, or the clock's present time if that
    is later. It ends its cost further on: its prompt and the most that it may generate. The clock shows the start tag
    of the request that was admitted last. So a tenant that sends much queues behind itself, and one that was idle
    saves up nothing. What a request was charged and has not used is given back when it ends: the tenant's waiting
    requests move forward by it.

    Args:
        max_model_len: bounds the output of requests that name no `max_tokens`.
    """

    changes_while_waiting = True

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._charges: dict[str, dict[str, Charge]] = {}  # tenant → request → charge, in order of arrival
        self._has_given_back = False

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the length of `config`."""
        return cls(config.max_model_len)

    def key(self, request: RequestView) -> float:
        """The start tag."""
        charge = self._charges.get(request.tenant, {}).get(request.request_id)
        return max(self._now, self._ends.get(request.tenant, 0.0)) if charge is None else charge.start

    def is_stale(self, moment: Moment) -> bool:
        """Whether something was given back since all were asked."""
        if not self._has_given_back or moment.num_waiting > MAX_RERANKED:
            return False
        self._has_given_back = False
        return True

    def added(self, request: RequestView) -> None:
        """Charge the tenant."""
        longest = self._max_model_len - request.num_prompt_tokens
        max_output = longest if request.max_tokens is None else min(longest, request.max_tokens)
        charge = Charge(self._now, self.key(request), request.num_prompt_tokens + max_output * request.num_sequences)
        self._charges.setdefault(request.tenant, {})[request.request_id] = charge
        self._ends[request.tenant] = charge.start + charge.cost

    def admitted(self, request: RequestView) -> None:
        """The virtual clock goes on to the request's start tag; tenants that it has passed are forgotten."""
        charge = self._charges[request.tenant][request.request_id]
        charge.is_admitted = True
        self._now = max(self._now, charge.start)
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def ended(self, request: RequestView) -> None:
        """Give back what was charged and not used."""
        charges = self._charges[request.tenant]
        charge = charges.pop(request.request_id)
        used = request.num_prompt_tokens + request.num_output_tokens if charge.is_admitted else 0
        surplus = charge.cost - used
        if surplus > 0 and request.tenant in self._ends:
            self._ends[request.tenant] -= surplus
            if len(charges) <= MAX_RERANKED:
                self._move_forward(charges, charge.start, surplus)
                last = max((other.start + other.cost for other in charges.values()), default=0.0)
                self._ends[request.tenant] = max(self._ends[request.tenant], last)
        if not charges:
            del self._charges[request.tenant]

    def _move_forward(self, charges: dict[str, Charge], after: float, surplus: float) -> None:
        """Move the start tags of one tenant's waiting requests that stand after a tag."""
        for charge in charges.values():
            if not charge.is_admitted and charge.start > after:
                charge.start = max(charge.earliest, charge.start - surplus)
                self._has_given_back = True
