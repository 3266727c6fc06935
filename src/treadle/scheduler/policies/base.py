"""What a policy is. A policy sees and chooses; only the scheduler changes anything.

There are three kinds: a PhasePolicy says which phases a step runs, a QueueOrder who goes first, a VictimPolicy who is
preempted first. All of them see requests as RequestView, and may note what happens to requests in hooks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from treadle.core.config import SchedulerConfig
from treadle.core.request import Request
from treadle.kvcache import KVCacheManager

MAX_RERANKED = 128
"""Orders that come with Treadle ask again only while at most so many requests wait, because asking costs for each."""


class Cut(Enum):
    """Which prompts may be computed in parts."""

    ANY = "any"
    ONLY_FIRST = "only the first sequence of the step"
    NEVER = "none"


class RequestView:
    """What a policy sees of a request; read-only, the same object from `added` to `ended`.

    Args:
        request: the request.
        kv: where the cache is asked.
    """

    __slots__ = ("_kv", "_request")

    def __init__(self, request: Request, kv: KVCacheManager) -> None:
        self._request = request
        self._kv = kv

    @property
    def request_id(self) -> str:
        """Its name, unique among the unfinished requests."""
        return self._request.request_id

    @property
    def arrival_number(self) -> int:
        """How many requests were added before it."""
        return self._request.arrival_number

    @property
    def arrival_time(self) -> float:
        """When it arrived, in seconds on the engine's clock."""
        return self._request.arrival_time

    @property
    def waiting_since(self) -> float:
        """When it arrived or was preempted last, in seconds on the engine's clock."""
        return self._request.waiting_since

    @property
    def priority(self) -> int:
        """As given; lower is better."""
        return self._request.priority

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._request.tenant

    @property
    def deadline(self) -> float:
        """Seconds on the engine's clock by which it should be done; infinite if there is no such time."""
        return self._request.deadline

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, of all its sequences."""
        return sum(seq.num_output_tokens for seq in self._request.sequences)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV it holds now, of all its sequences; those that sequences share count for each."""
        return sum(seq.num_computed_tokens for seq in self._request.live_sequences)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate in each sequence, as given; None for as many as the model's length allows."""
        return self._request.sampling_params.max_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences that it asks for: n."""
        return self._request.sampling_params.n

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""
        return self._request.metrics.num_preemptions

    def count_cached_tokens(self) -> int:
        """Tokens at its beginning whose KV the prefix cache holds now: a lookup per cached block."""
        return self._kv.plan_allocation(self._request).num_cached_tokens

    def __repr__(self) -> str:
        return f"RequestView({self.request_id!r})"


class StepBuilder(Protocol):
    """A step in the making: the phases as verbs, in any order and any number of times.

    Each phase takes what it can get of the budget that is left. A sequence runs at most once in a step, and what is
    in the step is not preempted.
    """

    @property
    def remaining_tokens(self) -> int:
        """What is left of the token budget."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the step so far."""
        ...

    @property
    def num_decoding(self) -> int:
        """Running sequences that could decode."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        ...

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in the host tier."""
        ...

    def decodes(self) -> None:
        """Every sequence whose known tokens are computed decodes, preempting others where blocks run out."""
        ...

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Partly computed prompts go on."""
        ...

    def swapped(self) -> None:
        """Swapped requests come back, unless the step has preempted."""
        ...

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Waiting requests start, unless the step has preempted."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The state in which an order is asked whether it has changed its mind.

    Attributes:
        now: seconds on the engine's clock.
        num_waiting: requests that wait, swapped ones included.
        num_running: sequences that run.
        cache_version: changes whenever the prefix cache may hold more of a prompt than before.
    """

    now: float
    num_waiting: int
    num_running: int
    cache_version: int


class Policy:
    """What the three kinds have in common: settings, and hooks that do nothing unless a policy overrides them."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The policy with its settings. One that has some takes them from `config` here."""
        return cls()

    def added(self, request: RequestView) -> None:
        """The request has arrived and has its place."""

    def admitted(self, request: RequestView) -> None:
        """The request runs for the first time."""

    def tokens(self, request: RequestView, num_computed: int, num_generated: int) -> None:
        """A step has computed and generated tokens of the request.

        Called for each request in each step if a policy overrides it, so it must be cheap.
        """

    def ended(self, request: RequestView) -> None:
        """The request has ended, for whatever reason; it is not seen again."""


class PhasePolicy(Policy):
    """Says which phases a step runs, and in which order.

    Attributes:
        needs_whole_prompts: whether it starts only prompts that fit a step whole, so that a step has to be as long as
            the longest prompt.
    """

    needs_whole_prompts: bool = False

    def run(self, step: StepBuilder) -> None:
        """Run the phases that this step is to have."""
        raise NotImplementedError


class QueueOrder(Policy):
    """Says who goes first.

    Attributes:
        displaces: whether running requests with a greater key may be preempted for one that waits.
        is_by_arrival: whether arrival alone decides, so that those in front have always waited longer. Then the age
            limit moves nobody.
        changes_while_waiting: whether `is_stale` is to be asked in every step.
    """

    displaces: bool = False
    is_by_arrival: bool = False
    changes_while_waiting: bool = False

    def key(self, request: RequestView) -> float:
        """The request's place; smaller goes first, and of two equal ones the one that arrived first.

        A question: it changes nothing. Asked before `added`, and again when `is_stale` says so.
        """
        raise NotImplementedError

    def is_stale(self, moment: Moment) -> bool:
        """Whether the keys of waiting requests have changed, so that all of them have to be asked for again."""
        return False


class VictimPolicy(Policy):
    """Says who is preempted first."""

    def order(self, candidates: Iterable[RequestView]) -> Iterable[RequestView]:
        """The candidates in the order in which they should fall; only as many do as make the room that is missing.

        Args:
            candidates: running requests that may fall, the last in rank first. Looked at no further than it is read.
        """
        raise NotImplementedError
