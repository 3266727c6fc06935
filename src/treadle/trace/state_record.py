"""The scheduler's state between two steps, as plain data that can be written as JSON."""

from typing import Any

from treadle.core.request import Request
from treadle.scheduler import SchedulerSnapshot
from treadle.trace.step_record import describe_wait_reasons


def describe_state(snapshot: SchedulerSnapshot) -> dict[str, Any]:
    """The queues with each request's progress, the blocks, the settings, and the texts of the reasons to wait."""
    now, cache_config = snapshot.time, snapshot.cache_config
    return {
        "step": snapshot.step,
        "time": now,
        "waiting": [_request(request, now) for request in snapshot.waiting],
        "running": [_request(request, now) for request in snapshot.running],
        "swapped": [_request(request, now) for request in snapshot.swapped],
        "blocks": {
            "total": cache_config.num_blocks,
            **snapshot.num_blocks,
            "size": cache_config.block_size,
            "host_total": cache_config.num_host_blocks,
        },
        "scheduler": snapshot.config.to_dict(),
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
