"""What a step did, as plain data that can be written as JSON: the one description that the step table, the recorder,
`treadle explain` and the page share.

A record is a mapping::

    step, time, duration    number; seconds on the engine's clock at its start; seconds it took
    tokens                  tokens computed, lookahead slots included
    ran                     request → {kind, start, count, of, sequences}; kind: prefill, re-prefill, decode, beam
    waiting, swapped        request → reason, or "" for those behind the first; in the order in which they go
    idle                    requests that run but had no part in the step
    preempted               [{request, for, mode}]
    swapped_in, ignored     requests
    arrived                 request → {prompt_tokens, max_tokens, n, priority, time}
    finished                request → {reason, output_tokens, cached_tokens, preemptions, queue_time, …}
    blocks                  {referenced, cached, free, host_used, host_free}
    block_changes           which blocks are held by whom since this step, see block_map
    swaps_out, swaps_in, copies   [[source block, target block]]
"""

from collections.abc import Iterable
from typing import Any

from treadle.clock import Clock
from treadle.engine.block_map import BlockMap
from treadle.request import Request
from treadle.scheduler import Scheduler, StepPlan

StepRecord = dict[str, Any]


class StepDescriber:
    """Makes the records of consecutive steps.

    Args:
        scheduler: that plans them.
        clock: of the engine.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._known: set[str] = set()
        self._record: StepRecord = {}
        self.blocks = BlockMap(scheduler)

    def catch_up(self) -> None:
        """Forget what earlier records have told: the next one starts from the state as it is now."""
        self._known = {request.request_id for request in self._scheduler.unfinished_requests()}
        self.blocks.changes()

    def begin(self, plan: StepPlan) -> None:
        """Describe a step before it runs."""
        start = self._clock.now()
        self._record = describe_plan(plan, self._scheduler, self._known)
        self._record["time"] = start
        self._record["block_changes"] = self.blocks.changes()

    def end(self, finished: Iterable[Request]) -> StepRecord:
        """The record, with what came of the step."""
        record = self._record
        record["finished"] = describe_finished(finished)
        record["duration"] = self._clock.now() - record["time"]
        self._known.difference_update(record["finished"])
        return record


def describe_plan(plan: StepPlan, scheduler: Scheduler, known: set[str]) -> StepRecord:
    """The record of a step that is about to run.

    Args:
        plan: the step.
        scheduler: that planned it.
        known: requests that earlier records have told of; new ones are added.
    """
    sequences = plan.batch.sequences
    ran: dict[str, dict[str, Any]] = {}
    for s in plan.sequences:
        seq = sequences[s.row]
        entry = ran.get(s.request_id)
        if entry is not None:
            entry["sequences"] += 1
            entry["count"] += s.count
            continue
        kind = "beam" if not s.is_prefill else "re-prefill" if seq.num_output_tokens else "prefill"
        of = seq.num_tokens_to_prefill if s.is_prefill else seq.num_tokens
        ran[s.request_id] = {"kind": kind, "start": s.start, "count": s.count, "of": of, "sequences": 1}
    for seq in sequences[plan.decode_rows]:
        entry = ran.setdefault(seq.request.request_id, {"kind": "decode", "count": 0, "sequences": 0})
        entry["count"] += 1
        entry["sequences"] += 1
    reasons = {refusal.request_id: refusal.reason.value for refusal in plan.refusals}
    running = scheduler.batch.running_requests()
    arrived = {}
    for request in scheduler.unfinished_requests():
        if request.request_id not in known:
            known.add(request.request_id)
            arrived[request.request_id] = {
                "prompt_tokens": len(request.prompt_token_ids),
                "max_tokens": request.sampling_params.max_tokens,
                "n": request.sampling_params.n,
                "priority": request.priority,
                "time": request.arrival_time,
            }
    return {
        "step": plan.step,
        "tokens": plan.num_batched_tokens,
        "ran": ran,
        "waiting": {r.request_id: reasons.get(r.request_id, "") for r in scheduler.waiting},
        "swapped": {r.request_id: reasons.get(r.request_id, "") for r in scheduler.swapped},
        "idle": [r.request_id for r in running if r.request_id not in ran],
        "preempted": [
            {"request": p.request_id, "for": p.for_request_id, "mode": p.mode.value} for p in plan.preempted
        ],
        "swapped_in": list(plan.swapped_in),
        "ignored": list(plan.ignored),
        "arrived": arrived,
        "blocks": describe_blocks(scheduler),
        "swaps_out": [list(pair) for pair in plan.blocks_to_swap_out],
        "swaps_in": [list(pair) for pair in plan.blocks_to_swap_in],
        "copies": [list(pair) for pair in plan.blocks_to_copy],
    }


def describe_blocks(scheduler: Scheduler) -> dict[str, int]:
    """How many blocks of the two tiers are in which state."""
    pool, host = scheduler.kv.pool, scheduler.kv.host_pool
    return {
        "referenced": pool.num_blocks - pool.num_available,
        "cached": pool.num_cached_idle,
        "free": pool.num_available - pool.num_cached_idle,
        "host_used": host.num_blocks - host.num_available,
        "host_free": host.num_available,
    }


def describe_finished(finished: Iterable[Request]) -> dict[str, dict[str, Any]]:
    """What a record says of requests that ended with its step."""
    return {request.request_id: _outcome(request) for request in finished}


def _outcome(request: Request) -> dict[str, Any]:
    metrics = request.metrics
    return {
        "reason": "/".join(dict.fromkeys(str(seq.finish_reason) for seq in request.sequences)),
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
