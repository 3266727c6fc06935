"""What the scheduler holds between two steps, as plain data that can be written as JSON."""

from typing import Any

from treadle.core.request import Request
from treadle.scheduler import Scheduler
from treadle.trace.step_record import describe_wait_reasons


def describe_state(scheduler: Scheduler, now: float) -> dict[str, Any]:
    """The queues with each request's progress, the blocks, the settings, and the texts of the reasons to wait.

    Args:
        scheduler: between two steps.
        now: seconds on the engine's clock.
    """
    waiting, swapped = list(scheduler.waiting), list(scheduler.swapped)
    elsewhere = {request.request_id for request in [*waiting, *swapped]}
    running = [r for r in scheduler.unfinished_requests() if r.request_id not in elsewhere]
    return {
        "step": scheduler.num_steps,
        "time": now,
        "waiting": [_request(request, now) for request in waiting],
        "running": [_request(request, now) for request in running],
        "swapped": [_request(request, now) for request in swapped],
        "blocks": {
            "total": scheduler.kv.pool.num_blocks,
            **scheduler.count_blocks(),
            "size": scheduler.kv.block_size,
            "host_total": scheduler.kv.host_pool.num_blocks,
        },
        "scheduler": scheduler.config.to_dict(),
        "wait_reasons": describe_wait_reasons(),
    }


def _request(request: Request, now: float) -> dict[str, Any]:
    metrics = request.metrics
    return {
        "id": request.request_id,
        "age": now - request.arrival_time,
        "arrival": request.arrival_time,
        "n": request.sampling_params.n,
        "max_tokens": request.sampling_params.max_tokens,
        "priority": request.priority,
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": metrics.num_cached_tokens,
        "preemptions": metrics.num_preemptions,
        "sequences": [
            {
                "index": seq.index,
                "tokens": seq.num_tokens,
                "computed": seq.num_computed_tokens,
                "finish_reason": None if seq.finish_reason is None else seq.finish_reason.value,
            }
            for seq in request.sequences
        ],
    }
