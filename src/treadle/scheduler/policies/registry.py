"""Finds policies by name: those that come with Treadle, and those that other packages bring.

A package registers its own under the entry-point group `treadle.policies`; the entry's name is what the user
gives as `scheduler` or `order`, and it is called without arguments.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from treadle.config import SchedulerConfig
from treadle.errors import ConfigError
from treadle.scheduler.policies.chunked import Chunked
from treadle.scheduler.policies.orders import (
    Deadline,
    Fair,
    FirstComeFirstServed,
    Priority,
    ShortestFirst,
)
from treadle.scheduler.policies.phased import Phased
from treadle.scheduler.policies.prefill_first import PrefillFirst
from treadle.scheduler.policies.protocols import PhasePolicy, QueueOrder
from treadle.scheduler.policies.three_phase import ThreePhase

ENTRY_POINT_GROUP = "treadle.policies"

PHASE_POLICIES: Mapping[str, Callable[[SchedulerConfig], PhasePolicy]] = {
    "chunked": lambda config: Chunked(),
    "three-phase": lambda config: ThreePhase(),
    "prefill-first": lambda config: PrefillFirst(config.max_consecutive_prefills),
    "phased": lambda config: Phased(config.max_consecutive_prefills),
}
WHOLE_PROMPT_POLICIES = frozenset({"three-phase", "prefill-first"})
"""These admit only prompts that fit a step whole."""

QUEUE_ORDERS: Mapping[str, Callable[[], QueueOrder]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest-first": ShortestFirst,
    "fair": Fair,
    "deadline": Deadline,
}


def check_policy_names(config: SchedulerConfig) -> None:
    """Raise ConfigError for a phase policy or an order that does not exist."""
    _find("scheduler", "policy", config.policy, PHASE_POLICIES)
    _find("order", "order", config.order, QUEUE_ORDERS)


def make_phase_policy(config: SchedulerConfig) -> PhasePolicy:
    """The phase policy that `config.policy` names; ConfigError for an unknown name."""
    builtin = PHASE_POLICIES.get(config.policy)
    if builtin is not None:
        return builtin(config)
    policy: PhasePolicy = _find("scheduler", "policy", config.policy, PHASE_POLICIES)()
    _require(policy, "run", "scheduler", config.policy)
    return policy


def make_queue_order(config: SchedulerConfig) -> QueueOrder:
    """The order that `config.order` names; ConfigError for an unknown name."""
    order: QueueOrder = _find("order", "order", config.order, QUEUE_ORDERS)()
    _require(order, "key", "order", config.order)
    return order


def _find(field: str, kind: str, name: str, builtin: Mapping[str, Any]) -> Any:
    if name in builtin:
        return builtin[name]
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name in others:
        return others[name].load()
    known = ", ".join([*sorted(builtin), *sorted(others)])
    raise ConfigError(field, f"unknown {kind} {name!r}; there are {known}")


def _require(policy: Any, method: str, field: str, name: str) -> None:
    if not callable(getattr(policy, method, None)):
        raise ConfigError(field, f"{name!r} has no method {method}(), so it cannot serve as {field}")
