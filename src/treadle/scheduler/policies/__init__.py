"""What a user or a third party can choose: which phases a step runs, who goes first, and who is preempted first.

Whoever writes a policy needs what this module exports; docs/scheduler.md shows how. `base` says what a policy is,
`registry` finds one by name and checks it, `at_work` keeps one that fails from harming anybody; every other file
holds policies.
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
