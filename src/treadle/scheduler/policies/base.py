"""The interfaces of policies. A policy only reads and decides; all changes are made by the scheduler.

There are three kinds. A PhasePolicy decides which phases a step runs, a QueueOrder in which order requests go, and a
VictimPolicy which request is preempted first. All of them see requests as RequestView, and can keep track of requests
in hooks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from treadle.core.config import SchedulerConfig
from treadle.core.request import Request
from treadle.kvcache import KVCacheManager

MAX_RERANKED = 128
"""Built-in orders recompute keys only while at most this many requests wait, because each key costs time."""


class Cut(Enum):
    """Which prompts may be computed in chunks."""

    ANY = "any"
    ONLY_FIRST = "only the first sequence of the step"
    NEVER = "none"


class RequestView:
    """A read-only view of a request, for policies. A request has the same view from `added` to `ended`.

    Args:
        request: the request.
        kv: the KV cache manager, for cache lookups.
    """

    __slots__ = ("_kv", "_request")

    def __init__(self, request: Request, kv: KVCacheManager) -> None:
        self._request = request
        self._kv = kv

    @property
    def request_id(self) -> str:
        """Id of the request, unique among the unfinished requests."""
        return self._request.request_id

    @property
    def arrival_number(self) -> int:
        """Number of requests that were added before this one."""
        return self._request.arrival_number

    @property
    def arrival_time(self) -> float:
        """Time of arrival, in seconds on the engine's clock."""
        return self._request.arrival_time

    @property
    def waiting_since(self) -> float:
        """Time of arrival or of the latest preemption, in seconds on the engine's clock."""
        return self._request.waiting_since

    @property
    def priority(self) -> int:
        """Priority given by the caller; lower is better."""
        return self._request.priority

    @property
    def tenant(self) -> str:
        """Name of the tenant that sent the request."""
        return self._request.tenant

    @property
    def deadline(self) -> float:
        """Time by which the request should finish, in seconds on the engine's clock; infinite if none is set."""
        return self._request.deadline

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self._request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far, summed over the request's sequences."""
        return sum(seq.num_output_tokens for seq in self._request.sequences)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is written, summed over the live sequences; shared tokens count for each one."""
        return sum(seq.num_computed_tokens for seq in self._request.live_sequences)

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of output tokens per sequence; None if only the model length limits it."""
        return self._request.sampling_params.max_tokens

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the caller asks for (`n`)."""
        return self._request.sampling_params.n

    @property
    def num_preemptions(self) -> int:
        """Number of times the request was preempted."""
        return self._request.metrics.num_preemptions

    def count_cached_tokens(self) -> int:
        """Return the length of the prefix whose KV is in the prefix cache now; costs one lookup per cached block."""
        return self._kv.plan_allocation(self._request).num_cached_tokens

    def __repr__(self) -> str:
        return f"RequestView({self.request_id!r})"


class StepBuilder(Protocol):
    """A step being built. Its methods are the phases, which may run in any order and any number of times.

    Each phase schedules as much as the remaining token budget allows. A sequence runs at most once in a step. A
    request that is in the step already is not preempted.
    """

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens left in the budget of the step."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether the step runs nothing so far."""
        ...

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that are ready to decode."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests; swapped requests are not included."""
        ...

    @property
    def num_swapped(self) -> int:
        """Number of requests whose blocks are in the host tier."""
        ...

    def decodes(self) -> None:
        """Schedule a decode for every sequence that is ready; preempt requests if blocks run out."""
        ...

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Continue the partly computed prompts."""
        ...

    def swapped(self) -> None:
        """Swap requests in, unless the step has preempted a request."""
        ...

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Admit waiting requests, unless the step has preempted a request."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the scheduler when it asks an order whether its keys are stale.

    Attributes:
        now: seconds on the engine's clock.
        num_waiting: number of waiting requests, swapped ones included.
        num_running: number of running sequences.
        cache_version: changes whenever the prefix cache may hold more of a prompt than before.
    """

    now: float
    num_waiting: int
    num_running: int
    cache_version: int


class Policy:
    """The common base of the three kinds: construction from the settings, and hooks that do nothing by default."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return a new policy. Override this method to take settings from `config`."""
        return cls()

    def added(self, request: RequestView) -> None:
        """Called when the request was queued."""

    def admitted(self, request: RequestView) -> None:
        """Called when the request was admitted for the first time."""

    def tokens(self, request: RequestView, num_computed: int, num_generated: int) -> None:
        """Called when a step has computed and generated tokens of the request.

        If a policy overrides this hook, it is called for each request in each step, so it must be cheap.
        """

    def ended(self, request: RequestView) -> None:
        """Called when the request has ended, for whatever reason. The policy does not see the request again."""


class PhasePolicy(Policy):
    """Decides which phases a step runs, and in which order.

    Attributes:
        needs_whole_prompts: whether the policy computes each prompt in a single step, so that the token budget of a
            step must be at least the maximum model length.
    """

    needs_whole_prompts: bool = False

    def run(self, step: StepBuilder) -> None:
        """Run the phases of this step."""
        raise NotImplementedError


class QueueOrder(Policy):
    """Decides in which order requests go.

    Attributes:
        displaces: whether running requests may be preempted for a waiting one with a smaller key.
        is_by_arrival: whether the order depends on the time of arrival alone. The age limit has no effect then,
            because the requests ahead have always waited longer.
        changes_while_waiting: whether the scheduler calls `is_stale` in every step.
    """

    displaces: bool = False
    is_by_arrival: bool = False
    changes_while_waiting: bool = False

    def key(self, request: RequestView) -> float:
        """Return the request's key. The smallest key goes first; requests with equal keys go in order of arrival.

        Must not change any state. Called before `added`, and again when `is_stale` returns True.
        """
        raise NotImplementedError

    def is_stale(self, moment: Moment) -> bool:
        """Whether the keys of waiting requests have changed, so that `key` must be called again for all of them."""
        return False


class VictimPolicy(Policy):
    """Decides which request is preempted first."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """Return the candidates in the order in which to preempt them; only as many as necessary are preempted.

        Args:
            candidates: running requests that may be preempted, last in rank first.
        """
        raise NotImplementedError
