"""Fair sharing between tenants, by the tokens that they use."""

from dataclasses import dataclass
from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import MAX_RERANKED, Moment, QueueOrder, RequestView


@dataclass(slots=True)
class Charge:
    """The charge for an unfinished request.

    Attributes:
        earliest: virtual time of the request's arrival.
        start: start tag.
        cost: number of prompt tokens, plus the maximum number of output tokens of all sequences.
        is_admitted: whether the request was admitted.
    """

    earliest: float
    start: float
    cost: float
    is_admitted: bool = False


class Fair(QueueOrder):
    """Start-time fair queueing (Goyal, Vin and Cheng 1996), corrected for the tokens that were really used.

    A request's start tag is the end tag of its tenant's previous request, or the present virtual time if that is
    later. Its end tag is the start tag plus its cost: the prompt and the maximum output, in tokens. The virtual time
    is the greatest start tag of any admitted request. Thus the requests of a busy tenant queue behind each other,
    and an idle tenant accumulates no credit. When a request ends, its unused charge is refunded: the tenant's
    waiting requests move forward by that amount.

    Args:
        max_model_len: limits the output of requests without `max_tokens`, in tokens.
    """

    changes_while_waiting = True

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._now = 0.0
        self._ends: dict[str, float] = {}  # tenant → end tag of its last request
        self._charges: dict[str, dict[str, Charge]] = {}  # tenant → request → charge, in order of arrival
        self._has_given_back = False

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return the order with `max_model_len` of `config`."""
        return cls(config.max_model_len)

    def key(self, request: RequestView) -> float:
        """Return the start tag."""
        charge = self._charges.get(request.tenant, {}).get(request.request_id)
        return max(self._now, self._ends.get(request.tenant, 0.0)) if charge is None else charge.start

    def is_stale(self, moment: Moment) -> bool:
        """Whether a refund has moved start tags since the keys were computed."""
        if not self._has_given_back or moment.num_waiting > MAX_RERANKED:
            return False
        self._has_given_back = False
        return True

    def added(self, request: RequestView) -> None:
        """Charge the tenant for the request."""
        longest = self._max_model_len - request.num_prompt_tokens
        max_output = longest if request.max_tokens is None else min(longest, request.max_tokens)
        charge = Charge(self._now, self.key(request), request.num_prompt_tokens + max_output * request.num_sequences)
        self._charges.setdefault(request.tenant, {})[request.request_id] = charge
        self._ends[request.tenant] = charge.start + charge.cost

    def admitted(self, request: RequestView) -> None:
        """Advance the virtual time to the request's start tag, and drop the end tags that it has passed."""
        charge = self._charges[request.tenant][request.request_id]
        charge.is_admitted = True
        self._now = max(self._now, charge.start)
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def ended(self, request: RequestView) -> None:
        """Refund the part of the charge that the request has not used."""
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
        """Move a tenant's waiting requests with start tags later than `after` forward by `surplus`."""
        for charge in charges.values():
            if not charge.is_admitted and charge.start > after:
                charge.start = max(charge.earliest, charge.start - surplus)
                self._has_given_back = True
