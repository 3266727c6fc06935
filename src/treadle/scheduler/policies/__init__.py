"""Scheduling policies: which phases a step runs, in which order requests go, and which request is preempted first.

This module exports everything that the author of a policy needs; docs/scheduler.md shows how to write one. `base`
defines the interfaces, `registry` finds a policy by name and checks it, and `active` isolates a policy that fails.
The other files contain the built-in policies.
"""

from treadle.scheduler.policies.base import (
    Cut,
    Moment,
    PhasePolicy,
    Policy,
    QueueOrder,
    RequestView,
    StepBuilder,
    VictimPolicy,
)

__all__ = [
    "Cut",
    "Moment",
    "PhasePolicy",
    "Policy",
    "QueueOrder",
    "RequestView",
    "StepBuilder",
    "VictimPolicy",
]
