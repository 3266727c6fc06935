"""Finds policies by name, built-in ones and those of other packages, and checks their whole interface.

A package registers its policies in the entry-point group `treadle.policies`. The user selects one by the name of the
entry point, as `scheduler`, `order` or `victim_policy`. A class is accepted in place of a name.
"""

import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from treadle.core.config import SchedulerConfig
from treadle.core.errors import ConfigError
from treadle.scheduler.policies.base import PhasePolicy, Policy, QueueOrder, VictimPolicy
from treadle.scheduler.policies.chunked import Chunked
from treadle.scheduler.policies.fair import Fair
from treadle.scheduler.policies.least_slack import LeastSlack
from treadle.scheduler.policies.orders import (
    CacheAware,
    Deadline,
    FirstComeFirstServed,
    Priority,
    ShortestFirst,
)
from treadle.scheduler.policies.phased import Phased
from treadle.scheduler.policies.prefill_first import PrefillFirst
from treadle.scheduler.policies.three_phase import ThreePhase
from treadle.scheduler.policies.victims import LastInRank, LeastComputed

ENTRY_POINT_GROUP = "treadle.policies"

HOOKS = {"added": 1, "admitted": 1, "tokens": 3, "ended": 1}
"""The hooks of every policy: name → number of arguments besides self."""


class Kind(NamedTuple):
    """One of the three kinds of policies.

    Attributes:
        field: the setting that selects a policy of this kind.
        noun: name of the kind in error messages.
        base: base class; a policy must override the first of `methods`.
        builtin: name → class of each built-in policy; the first one is the default.
        methods: name → number of arguments of each method, hooks excluded.
        flags: names of the boolean attributes.
    """

    field: str
    noun: str
    base: type[Policy]
    builtin: Mapping[str, type[Any]]
    methods: Mapping[str, int]
    flags: tuple[str, ...]


PHASES = Kind(
    "scheduler",
    "phase policy",
    PhasePolicy,
    {"chunked": Chunked, "three-phase": ThreePhase, "prefill-first": PrefillFirst, "phased": Phased},
    {"run": 1},
    ("needs_whole_prompts",),
)
ORDERS = Kind(
    "order",
    "order",
    QueueOrder,
    {
        "fcfs": FirstComeFirstServed,
        "priority": Priority,
        "shortest-first": ShortestFirst,
        "fair": Fair,
        "deadline": Deadline,
        "least-slack": LeastSlack,
        "cache-aware": CacheAware,
    },
    {"key": 1, "is_stale": 1},
    ("displaces", "is_by_arrival", "changes_while_waiting"),
)
VICTIMS = Kind(
    "victim_policy",
    "victim policy",
    VictimPolicy,
    {"last-in-rank": LastInRank, "least-computed": LeastComputed},
    {"order": 1},
    (),
)


def check_policies(config: SchedulerConfig) -> None:
    """Raise ConfigError if a policy of `config` does not exist or lacks a part of its interface."""
    find(PHASES, config.scheduler)
    find(ORDERS, config.order)
    find(VICTIMS, config.victim_policy)


def needs_whole_prompts(policy: str | type[Any]) -> bool:
    """Whether the phase policy, given by name or class, needs whole prompts. Raises ConfigError if it is unknown."""
    return bool(find(PHASES, policy).needs_whole_prompts)


def make_phase_policy(config: SchedulerConfig) -> PhasePolicy:
    """Return a new phase policy as set in `config`. Raises ConfigError if it is unknown or invalid."""
    policy: PhasePolicy = _make(PHASES, config.scheduler, config)
    return policy


def make_queue_order(config: SchedulerConfig) -> QueueOrder:
    """Return a new queue order as set in `config`. Raises ConfigError if it is unknown or invalid."""
    order: QueueOrder = _make(ORDERS, config.order, config)
    return order


def make_victim_policy(config: SchedulerConfig) -> VictimPolicy:
    """Return a new victim policy as set in `config`. Raises ConfigError if it is unknown or invalid."""
    policy: VictimPolicy = _make(VICTIMS, config.victim_policy, config)
    return policy


def make_default(kind: Kind, config: SchedulerConfig) -> Any:
    """Return a new policy of the kind's default class, which replaces a policy that failed."""
    return next(iter(kind.builtin.values())).from_config(config)


def find(kind: Kind, name: str | type[Any]) -> type[Any]:
    """Return the class with that name, or the given class, after a check. Raises ConfigError.

    Args:
        kind: the kind of policy.
        name: name of a built-in policy or of an entry point, or a class.
    """
    if isinstance(name, type):
        _check(kind, name.__name__, name)
        return name
    if not isinstance(name, str):
        raise ConfigError(kind.field, f"must be the name of a {kind.noun} or a class, got {name!r}")
    if name in kind.builtin:
        return kind.builtin[name]
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in others:
        known = ", ".join([*sorted(kind.builtin), *sorted(others)])
        raise ConfigError(kind.field, f"unknown {kind.noun} {name!r}; known: {known}")
    try:
        found = others[name].load()
    except Exception as error:
        raise ConfigError(kind.field, f"{name!r} cannot be imported: {error!r}") from error
    _check(kind, name, found)
    policy: type[Any] = found
    return policy


def _make(kind: Kind, name: str | type[Any], config: SchedulerConfig) -> Any:
    found = find(kind, name)
    try:
        return found.from_config(config)
    except Exception as error:
        raise ConfigError(kind.field, f"{_name(name)!r} failed in from_config(): {error!r}") from error


def _name(name: str | type[Any]) -> str:
    return name if isinstance(name, str) else name.__name__


def _check(kind: Kind, name: str, found: Any) -> None:
    """Raise ConfigError unless `found` is a class with the whole interface of this kind."""
    if not isinstance(found, type):
        raise ConfigError(kind.field, f"{name!r} must be a class, got {found!r}")
    to_write = next(iter(kind.methods))
    for method, num_arguments in {**kind.methods, **HOOKS, "from_config": 1}.items():
        is_left_out = method == to_write and getattr(found, method, None) is getattr(kind.base, method)
        if is_left_out or not callable(getattr(found, method, None)):
            raise ConfigError(kind.field, f"{name!r} has no method {method}(), which every {kind.noun} needs")
        is_bound = isinstance(inspect.getattr_static(found, method), (classmethod, staticmethod))
        if method == "from_config" and not is_bound:
            raise ConfigError(kind.field, f"{name!r}: from_config() must be a classmethod")
        arguments = [None] * (num_arguments + (not is_bound))
        try:
            inspect.signature(getattr(found, method)).bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                kind.field, f"{name!r}: {method}() must take {num_arguments} argument(s) besides self ({error})"
            ) from error
    for flag in kind.flags:
        value = getattr(found, flag, None)
        if not isinstance(value, bool):
            raise ConfigError(kind.field, f"{name!r}: {flag} must be True or False, got {value!r}")
