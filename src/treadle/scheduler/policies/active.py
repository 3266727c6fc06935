"""The policies in use by a scheduler. A policy that fails is logged once and permanently replaced by the default."""

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


class ActivePolicies:
    """Calls the three policies with read-only views of the requests, and validates every return value.

    When a policy raises or returns an invalid value, the default policy replaces it, for this call and all later
    ones. No request is affected otherwise.

    Args:
        config: the scheduler's settings, which name the policies.
        kv: the KV cache manager, which the views query.

    Attributes:
        ranks_are_void: whether the order was replaced, so that all requests need new ranks.
        observes_tokens: whether a policy overrides the `tokens` hook.
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

    # Properties of the policies

    @property
    def displaces(self) -> bool:
        """Whether running requests may be preempted for a waiting one with a smaller key."""
        return self._order.displaces

    @property
    def is_by_arrival(self) -> bool:
        """Whether the rank depends on the time of arrival alone."""
        return self._order.is_by_arrival

    @property
    def changes_while_waiting(self) -> bool:
        """Whether the keys of waiting requests can change."""
        return self._order.changes_while_waiting

    # Calls of policy methods. A call may replace a policy that fails.

    def key(self, request: Request) -> float:
        """Return the request's key in the order."""
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
        """Whether the keys of all waiting requests have to be computed again."""
        order = self._order
        try:
            return bool(order.is_stale(moment))
        except Exception as error:
            self._replace(registry.ORDERS, order, error)
            return False

    def victims(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Yield the candidates in the order in which to preempt them.

        Args:
            candidates: running requests, last in rank first; consumed lazily if the victim policy is the default.
        """
        policy = self._victims
        if type(policy) is registry.VICTIMS.builtin["last-in-rank"]:
            yield from candidates
            return
        requests = list(candidates)
        left = {self._view(request): request for request in requests}
        try:
            for view in policy.order(list(left)):
                if view not in left:
                    raise ValueError(f"order() returned {view!r}, which is not a candidate or was returned before")
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
            if step.error is not None:  # an error of the scheduler itself
                raise
            self._replace(registry.PHASES, policy, error)
            self._phases.run(step)

    def run_default(self, step: "GuardedStep") -> bool:
        """Replace a phase policy that made no progress and plan the step with the default.

        Returns:
            False if the phase policy is the default already; nothing is planned then.
        """
        policy = self._phases
        if type(policy) is next(iter(registry.PHASES.builtin.values())):
            return False
        self._replace(registry.PHASES, policy, RuntimeError("it scheduled nothing although requests could continue"))
        self._phases.run(step)
        return True

    # Hooks

    def added(self, request: Request) -> None:
        """Call the hook of the same name in each policy: the request was queued."""
        self._call_hook("added", request)

    def admitted(self, request: Request) -> None:
        """Call the hook of the same name in each policy: the request was admitted for the first time."""
        self._call_hook("admitted", request)

    def tokens(self, request: Request, num_computed: int, num_generated: int) -> None:
        """Call the hook of the same name in each policy: a step has computed and generated tokens of the request."""
        self._call_hook("tokens", request, num_computed, num_generated)

    def ended(self, request: Request) -> None:
        """Call the hook of the same name in each policy: the request has ended."""
        self._call_hook("ended", request)
        self._views.pop(request, None)

    # Internal

    def _call_hook(self, hook: str, request: Request, *numbers: int) -> None:
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
            "%s %r failed (%s: %s); %r replaces it until the engine restarts; no request is lost",
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
    """The step that a policy sees. Distinguishes the scheduler's own errors from errors of the policy.

    Attributes:
        error: the exception that a phase raised; None if none did.
    """

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self.error: Exception | None = None

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens left in the budget of the step."""
        return self._step.remaining_tokens

    @property
    def is_empty(self) -> bool:
        """Whether the step runs nothing so far."""
        return self._step.is_empty

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that are ready to decode."""
        return self._step.num_decoding

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests; swapped requests are not included."""
        return self._step.num_waiting

    @property
    def num_swapped(self) -> int:
        """Number of requests whose blocks are in the host tier."""
        return self._step.num_swapped

    def decodes(self) -> None:
        """Schedule the decodes."""
        self._run(self._step.decodes)

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Continue the partly computed prompts."""
        self._run(self._step.chunks, cut)

    def swapped(self) -> None:
        """Swap requests in."""
        self._run(self._step.swapped)

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Admit waiting requests."""
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
