"""Describes a step as plain data that can be written as JSON. The step table, recordings, `treadle explain` and the
page all use this description.

A record is a mapping::

    step, time, duration    number; seconds on the engine's clock at its start; seconds it took
    tokens                  tokens computed, drafts included
    ran                     request → {kind, start, count, of, sequences}; kind: prefill, re-prefill, decode, beam
    waiting, swapped        request → code of a WaitReason, or "" if it was not looked at; in rank order
    idle                    running requests that were not in the step
    preempted               [{request, for, mode}]
    swapped_in, ignored     requests
    arrived                 request → {prompt_tokens, max_tokens, n, priority, time}
    finished                request → {finish_reasons, output_tokens, cached_tokens, preemptions, queue_time, …}
    blocks                  {referenced, cached, free, host_used, host_free}
    block_changes           blocks whose holder has changed, see block_map
    swaps_out, swaps_in, copies   [[source block, target block]]
"""

from collections.abc import Iterable
from typing import Any

from treadle.core.clock import Clock
from treadle.core.request import Request
from treadle.scheduler import RunKind, StepReport, WaitReason
from treadle.scheduler.report import BlockHolders
from treadle.trace.block_map import BlockMap

StepRecord = dict[str, Any]


class StepDescriber:
    """Makes records of consecutive steps from reports with details.

    Args:
        num_blocks: of the device tier.
        clock: of the engine.
    """

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._finished: list[Request] = []
        self.blocks = BlockMap(num_blocks)

    def catch_up(self, holders: BlockHolders) -> None:
        """Let the next record start from these holders of the blocks instead of from the previous record."""
        self._finished = []
        self.blocks.changes(holders)

    def describe(self, report: StepReport | None, finished: Iterable[Request]) -> StepRecord | None:
        """The record of a step that has run; it includes requests that ended before it without a step.

        Args:
            report: of the step; there is no record if it is None or has no details.
            finished: requests that ended since the previous call.
        """
        self._finished += finished
        if report is None or report.details is None:
            return None
        record = _describe_step(report, self._finished)
        self._finished = []
        record["block_changes"] = self.blocks.changes(report.details.holders)
        record["duration"] = self._clock.now() - report.time
        return record


def _describe_step(report: StepReport, finished: Iterable[Request]) -> StepRecord:
    """The record of a step, except its block changes and its duration.

    Args:
        report: with details.
        finished: requests that ended with the step.
    """
    details, moves = report.details, report.plan.moves
    assert details is not None
    ran: dict[str, dict[str, Any]] = {}
    for s in details.ran:
        entry = ran.get(s.request_id)
        if entry is not None:
            entry["sequences"] += 1
            entry["count"] += s.count
        elif s.kind is RunKind.DECODE:
            ran[s.request_id] = {"kind": s.kind.value, "count": s.count, "sequences": 1}
        else:
            ran[s.request_id] = {
                "kind": s.kind.value, "start": s.start, "count": s.count, "of": s.of, "sequences": 1
            }  # fmt: skip
    reasons = {refusal.request_id: refusal.reason.value for refusal in report.refusals}
    return {
        "step": report.plan.step,
        "time": report.time,
        "tokens": report.plan.num_batched_tokens,
        "ran": ran,
        "waiting": {name: reasons.get(name, "") for name in details.waiting},
        "swapped": {name: reasons.get(name, "") for name in details.swapped},
        "idle": [name for name in details.running if name not in ran],
        "preempted": [
            {"request": p.request_id, "for": p.for_request_id, "mode": p.mode.value} for p in report.preempted
        ],
        "swapped_in": list(report.swapped_in),
        "ignored": list(report.ignored),
        "arrived": {
            a.request_id: {
                "prompt_tokens": a.num_prompt_tokens,
                "max_tokens": a.max_tokens,
                "n": a.n,
                "priority": a.priority,
                "time": a.time,
            }
            for a in details.arrived
        },
        "blocks": details.num_blocks,
        "swaps_out": [list(pair) for pair in moves.swap_out],
        "swaps_in": [list(pair) for pair in moves.swap_in],
        "copies": [list(pair) for pair in moves.copy],
        "finished": {request.request_id: _outcome(request) for request in finished},
    }


def describe_wait_reasons() -> dict[str, str]:
    """Code → text of every reason to wait, for programs that show records to people."""
    return {reason.value: reason.text for reason in WaitReason}


def _outcome(request: Request) -> dict[str, Any]:
    metrics = request.metrics
    return {
        "finish_reasons": list(dict.fromkeys(str(seq.finish_reason) for seq in request.sequences)),
        "error": request.error,
        "output_tokens": sum(seq.num_output_tokens for seq in request.sequences),
        "cached_tokens": metrics.num_cached_tokens,
        "arrival": metrics.arrival_time,
        "first_scheduled": metrics.first_scheduled_time,
        "first_token": metrics.first_token_time,
        "finish": metrics.finished_time,
        "queue_time": metrics.time_in_queue,
        "preemptions": [{"step": p.step, "mode": p.mode, "for": p.for_request_id} for p in metrics.preemptions],
    }
