"""Conditions for admitting or swapping in a request. The functions of this module change no state."""

from treadle.core.request import Request
from treadle.scheduler.state import BlockRefusal, SchedulerState

MAX_HEADROOM_DOUBLINGS = 16
"""Limit for the doubling of the admission headroom with each preemption; the result exceeds any pool anyway."""


def headroom(state: SchedulerState, request: Request, num_running: int) -> int:
    """Return how many blocks must stay free next to `num_running` sequences when `request` is admitted.

    The number doubles with each earlier preemption of the request.
    """
    doublings = min(request.metrics.num_preemptions, MAX_HEADROOM_DOUBLINGS)
    return state.config.admission_headroom * num_running << doublings


def lacks_adapter(state: SchedulerState, request: Request) -> bool:
    """Whether `request` would exceed `max_loras` adapters; False for requests to the base model."""
    if request.lora is None or request.lora.lora_int_id in state.adapters:
        return False
    return len(state.adapters) >= state.config.max_loras


def is_behind_swapped(state: SchedulerState, request: Request) -> bool:
    """Whether a swapped request that waits for blocks or seats precedes `request` in rank."""
    for swapped in state.swapped:
        if swapped.rank > request.rank:
            return False
        if not lacks_adapter(state, swapped):
            return True
    return False


def is_still_refused(state: SchedulerState, request: Request) -> bool:
    """Whether `request` was refused for lack of blocks and the conditions have not improved since."""
    now = BlockRefusal(request, state.kv.num_available_blocks, len(state.batch), state.kv.version)
    return is_no_better(now, state.block_refusal)


def is_no_better(now: BlockRefusal, last: BlockRefusal | None) -> bool:
    """Whether a request refused under the conditions `last` must also be refused under the conditions `now`."""
    return (
        last is not None
        and last.request is now.request
        and now.num_available_blocks <= last.num_available_blocks
        and now.num_running >= last.num_running
        and now.cache_version == last.cache_version
    )
