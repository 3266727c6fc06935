"""Decides what each step runs. Plain arrays and objects; imports no torch."""

from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.invariants import check_invariants
from treadle.scheduler.plan import (
    Preemption,
    PreemptionMode,
    Refusal,
    ScheduledSequence,
    SequenceResult,
    StepOutputs,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WaitReason,
)
from treadle.scheduler.scheduler import Scheduler

__all__ = [
    "Preemption",
    "PreemptionMode",
    "Refusal",
    "RunningBatch",
    "ScheduledSequence",
    "Scheduler",
    "SequenceResult",
    "StepOutputs",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "WaitReason",
    "check_invariants",
]
