"""Finds policies by name, those that come with Treadle and those that other packages bring, and checks them in full.

A package registers its own under the entry-point group `treadle.policies`; the entry's name is what the user gives as
`scheduler`, `order` or `victim_policy`. A class may be given instead of a name.
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
"""Hooks of every policy, and the arguments that each is called with."""


class Kind(NamedTuple):
    """One of the three kinds of policies.

    Attributes:
        field: the setting that names one.
        noun: what an error message calls it.
        base: the class that leaves the first of `methods` to the policy.
        builtin: those that come with Treadle; the first one is the default.
        methods: name → number of arguments, beside the hooks.
        flags: attributes that are True or False.
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
    """Raise ConfigError for a policy that does not exist or cannot do what it has to."""
    find(PHASES, config.scheduler)
    find(ORDERS, config.order)
    find(VICTIMS, config.victim_policy)


def needs_whole_prompts(policy: str | type[Any]) -> bool:
    """Whether the phase policy, a name or a class, starts only prompts that fit a step; ConfigError if unknown."""
    return bool(find(PHASES, policy).needs_whole_prompts)


def make_phase_policy(config: SchedulerConfig) -> PhasePolicy:
    """The phase policy of `config`, with its settings; ConfigError if there is none."""
    policy: PhasePolicy = _make(PHASES, config.scheduler, config)
    return policy


def make_queue_order(config: SchedulerConfig) -> QueueOrder:
    """The order of `config`, with its settings; ConfigError if there is none."""
    order: QueueOrder = _make(ORDERS, config.order, config)
    return order


def make_victim_policy(config: SchedulerConfig) -> VictimPolicy:
    """The victim policy of `config`, with its settings; ConfigError if there is none."""
    policy: VictimPolicy = _make(VICTIMS, config.victim_policy, config)
    return policy


def make_default(kind: Kind, config: SchedulerConfig) -> Any:
    """The policy of that kind that cannot fail."""
    return next(iter(kind.builtin.values())).from_config(config)


def find(kind: Kind, name: str | type[Any]) -> type[Any]:
    """The checked class of that name; ConfigError if there is none or it lacks something."""
    if isinstance(name, type):
        _check(kind, name.__name__, name)
        return name
    if not isinstance(name, str):
        raise ConfigError(kind.field, f"{name!r} is neither a name nor a class")
    if name in kind.builtin:
        return kind.builtin[name]
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in others:
        known = ", ".join([*sorted(kind.builtin), *sorted(others)])
        raise ConfigError(kind.field, f"unknown {kind.noun} {name!r}; there are {known}")
    try:
        found = others[name].load()
    except Exception as error:
        raise ConfigError(kind.field, f"{name!r} cannot be imported ({error!r})") from error
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
    """Raise ConfigError unless `found` is a class with all that a policy of this kind has."""
    if not isinstance(found, type):
        raise ConfigError(kind.field, f"{name!r} is {found!r}; it has to be a class")
    to_write = next(iter(kind.methods))
    for method, num_arguments in {**kind.methods, **HOOKS, "from_config": 1}.items():
        is_left_out = method == to_write and getattr(found, method, None) is getattr(kind.base, method)
        if is_left_out or not callable(getattr(found, method, None)):
            raise ConfigError(kind.field, f"{name!r} has no method {method}(), so it cannot serve as {kind.field}")
        is_bound = isinstance(inspect.getattr_static(found, method), (classmethod, staticmethod))
        if method == "from_config" and not is_bound:
            raise ConfigError(kind.field, f"{name!r}: from_config() has to be a classmethod")
        arguments = [None] * (num_arguments + (not is_bound))
        try:
            inspect.signature(getattr(found, method)).bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                kind.field, f"{name!r}: {method}() has to take {num_arguments} arguments beside self ({error})"
            ) from error
    for flag in kind.flags:
        value = getattr(found, flag, None)
        if not isinstance(value, bool):
            raise ConfigError(kind.field, f"{name!r}: {flag} has to be True or False, got {value!r}")
