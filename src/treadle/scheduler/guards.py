"""Questions that decide whether a request may come in now. Nothing here changes anything."""

from treadle.core.request import Request
from treadle.scheduler.state import BlockRefusal, SchedulerState

MAX_HEADROOM_DOUBLINGS = 16
"""Admission headroom doubles with each preemption; beyond this it exceeds every pool anyway."""


def headroom(state: SchedulerState, request: Request, num_running: int) -> int:
    """Blocks to leave free beside `num_running` sequences: more for a request that was preempted before."""
    doublings = min(request.metrics.num_preemptions, MAX_HEADROOM_DOUBLINGS)
    return state.config.admission_headroom * num_running << doublings


def lacks_adapter(state: SchedulerState, request: Request) -> bool:
    """Whether the step would have more adapters than `max_loras`; the base model is never refused."""
    if request.lora is None or request.lora.lora_int_id in state.adapters:
        return False
    return len(state.adapters) >= state.config.max_loras


def is_behind_swapped(state: SchedulerState, request: Request) -> bool:
    """Whether a swapped request that waits for blocks or seats precedes it in rank."""
    for swapped in state.swapped:
        if swapped.rank > request.rank:
            return False
        if not lacks_adapter(state, swapped):
            return True
    return False


def is_still_refused(state: SchedulerState, request: Request) -> bool:
    """Whether nothing has changed for the better since `request` was refused for lack of blocks."""
    now = BlockRefusal(request, state.kv.num_available_blocks, len(state.batch), state.kv.version)
    return is_no_better(now, state.block_refusal)


def is_no_better(now: BlockRefusal, last: BlockRefusal | None) -> bool:
    """Whether the request that was refused in the state `last` has to be refused in the state `now`, too."""
    return (
        last is not None
        and last.request is now.request
        and now.num_available_blocks <= last.num_available_blocks
        and now.num_running >= last.num_running
        and now.cache_version == last.cache_version
    )
