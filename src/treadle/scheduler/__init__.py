"""The scheduler: decides what each step runs. Works on plain arrays and objects; does not import torch."""

from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.invariants import check_invariants
from treadle.scheduler.plan import BlockMoves, NewBlocks, NewRow, StepPlan, StepResult, TokenLogprobs
from treadle.scheduler.report import (
    Preemption,
    PreemptionMode,
    Refusal,
    RunKind,
    RunSequence,
    SchedulerSnapshot,
    SchedulerStats,
    StepDetails,
    StepOutputs,
    StepReport,
    WaitReason,
)
from treadle.scheduler.scheduler import Scheduler

__all__ = [
    "BlockMoves",
    "NewBlocks",
    "NewRow",
    "Preemption",
    "PreemptionMode",
    "Refusal",
    "RunKind",
    "RunSequence",
    "RunningBatch",
    "Scheduler",
    "SchedulerSnapshot",
    "SchedulerStats",
    "StepDetails",
    "StepOutputs",
    "StepPlan",
    "StepReport",
    "StepResult",
    "TokenLogprobs",
    "WaitReason",
    "check_invariants",
]
