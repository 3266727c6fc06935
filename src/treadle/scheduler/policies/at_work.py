"""The policies that a scheduler works with. One that fails is reported once and replaced by the default for good."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from treadle.core.config import SchedulerConfig
from treadle.core.request import Request
from treadle.kvcache import KVCacheManager
from treadle.scheduler.policies import registry
from treadle.scheduler.policies.base import Cut, Moment, Policy, RequestView, StepBuilder

logger = logging.getLogger("treadle")


class PoliciesAtWork:
    """Asks the three policies, shows them requests as views, and checks every answer.

    A policy that raises, or whose answer makes no sense, loses its influence and nothing else happens: the default
    answers this question and all that follow.

    Args:
        config: names the policies.
        kv: where views ask the cache.

    Attributes:
        ranks_are_void: whether the order has been replaced, so that all requests need new ranks.
        observes_tokens: whether a policy is to be told of the tokens of each step.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self._phases = registry.make_phase_policy(config)
        self._order = registry.make_queue_order(config)
        self._victims = registry.make_victim_policy(config)
        self._views: dict[Request, RequestView] = {}
        self.ranks_are_void = False
        self.observes_tokens = self._any_observes_tokens()

    # Questions

    @property
    def displaces(self) -> bool:
        """Whether running requests may fall for a waiting one of smaller key."""
        return self._order.displaces

    @property
    def is_by_arrival(self) -> bool:
        """Whether arrival alone decides who goes first."""
        return self._order.is_by_arrival

    @property
    def changes_while_waiting(self) -> bool:
        """Whether the order may want to be asked again for requests that wait."""
        return self._order.changes_while_waiting

    # What policies are asked. A question may note a failure.

    def key(self, request: Request) -> float:
        """Where the order puts the request."""
        order = self._order
        try:
            key = float(order.key(self._view(request)))
            if math.isnan(key):
                raise ValueError("key() returned NaN")
        except Exception as error:
            self._replace(registry.ORDERS, order, error)
            return float(self._order.key(self._view(request)))
        return key

    def are_ranks_stale(self, moment: Moment) -> bool:
        """Whether the order wants to be asked again for all that wait."""
        order = self._order
        try:
            return bool(order.is_stale(moment))
        except Exception as error:
            self._replace(registry.ORDERS, order, error)
            return False

    def victims(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """The candidates, last in rank first, in the order in which they should fall; read only as far as needed."""
        policy = self._victims
        if type(policy) is registry.VICTIMS.builtin["last-in-rank"]:
            yield from candidates
            return
        requests = list(candidates)
        left = {self._view(request): request for request in requests}
        try:
            for view in policy.order(list(left)):
                if view not in left:
                    raise ValueError(f"order() returned {view!r}, which is no candidate or was returned before")
                yield left.pop(view)
        except Exception as error:
            self._replace(registry.VICTIMS, policy, error)
        yield from [request for request in requests if self._view(request) in left]

    def run(self, step: "GuardedStep") -> None:
        """Let the phase policy plan a step."""
        policy = self._phases
        try:
            policy.run(step)
        except Exception as error:
            if step.error is not None:  # the scheduler's own fault
                raise
            self._replace(registry.PHASES, policy, error)
            self._phases.run(step)

    def run_default(self, step: "GuardedStep") -> bool:
        """The phase policy has let the scheduler stand still: replace it; False if it is the default already."""
        policy = self._phases
        if type(policy) is next(iter(registry.PHASES.builtin.values())):
            return False
        self._replace(registry.PHASES, policy, RuntimeError("it ran nothing although requests could go on"))
        self._phases.run(step)
        return True

    # Hooks

    def added(self, request: Request) -> None:
        """The request has arrived and has its place."""
        self._tell("added", request)

    def admitted(self, request: Request) -> None:
        """The request runs for the first time."""
        self._tell("admitted", request)

    def tokens(self, request: Request, num_computed: int, num_generated: int) -> None:
        """A step has computed and generated tokens of the request."""
        self._tell("tokens", request, num_computed, num_generated)

    def ended(self, request: Request) -> None:
        """The request has ended."""
        self._tell("ended", request)
        self._views.pop(request, None)

    # Inside

    def _tell(self, hook: str, request: Request, *numbers: int) -> None:
        for kind, policy in zip((registry.PHASES, registry.ORDERS, registry.VICTIMS), self._all(), strict=True):
            if _overrides(policy, hook):
                try:
                    getattr(policy, hook)(self._view(request), *numbers)
                except Exception as error:
                    self._replace(kind, policy, error)

    def _view(self, request: Request) -> RequestView:
        view = self._views.get(request)
        if view is None:
            view = self._views[request] = RequestView(request, self._kv)
        return view

    def _replace(self, kind: registry.Kind, policy: Policy, error: Exception) -> None:
        default = registry.make_default(kind, self._config)
        logger.error(
            "%s %r failed (%s: %s) and is replaced by %r until the engine is started again; no request is lost",
            kind.noun, type(policy).__name__, type(error).__name__, error, next(iter(kind.builtin)),
            exc_info=error,
        )  # fmt: skip
        if kind is registry.PHASES:
            self._phases = default
        elif kind is registry.VICTIMS:
            self._victims = default
        else:
            self._order = default
            self.ranks_are_void = True
        self.observes_tokens = self._any_observes_tokens()

    def _all(self) -> tuple[Policy, ...]:
        return self._phases, self._order, self._victims

    def _any_observes_tokens(self) -> bool:
        return any(_overrides(policy, "tokens") for policy in self._all())


class GuardedStep(StepBuilder):
    """The verbs of a step, for a policy; keeps the scheduler's own errors apart from the policy's.

    Attributes:
        error: what went wrong inside a verb.
    """

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self.error: Exception | None = None

    @property
    def remaining_tokens(self) -> int:
        """What is left of the token budget."""
        return self._step.remaining_tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the step so far."""
        return self._step.is_empty

    @property
    def num_decoding(self) -> int:
        """Running sequences that could decode."""
        return self._step.num_decoding

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._step.num_waiting

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in the host tier."""
        return self._step.num_swapped

    def decodes(self) -> None:
        """Sequences decode."""
        self._run(self._step.decodes)

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Partly computed prompts go on."""
        self._run(self._step.chunks, cut)

    def swapped(self) -> None:
        """Swapped requests come back."""
        self._run(self._step.swapped)

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Waiting requests start."""
        self._run(self._step.admissions, cut)

    def _run(self, verb: Callable[..., None], *cut: Cut) -> None:
        if not all(isinstance(value, Cut) for value in cut):
            raise TypeError(f"{verb.__name__}() takes a Cut, got {cut[0]!r}")
        try:
            verb(*cut)
        except Exception as error:
            self.error = error
            raise


def _overrides(policy: Any, hook: str) -> bool:
    return getattr(type(policy), hook) is not getattr(Policy, hook)
