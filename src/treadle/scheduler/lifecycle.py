"""Moves requests from queue to queue. Each function is one transition and keeps queue, rows and blocks consistent.

::

    waiting ──admit──▶ running ──end──▶ finished
      ▲  ▲               │  ▲
      │  └── recompute ──┤  │
      │                  │  └── swap_in ── swapped
      └─ recompute_lost  └──── swap_out ─────▲
"""

import math

from treadle.core.outputs import PreemptionRecord
from treadle.core.request import FinishReason, Rank, Request, RequestStatus, Sequence
from treadle.kvcache import AllocationPlan, BlockPairs
from treadle.scheduler.report import PreemptionMode
from treadle.scheduler.state import SchedulerState


def token_limit(state: SchedulerState, request: Request) -> int:
    """Return the number of tokens, prompt included, at which the request's sequences end."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return state.config.max_model_len
    return min(state.config.max_model_len, len(request.prompt_token_ids) + max_tokens)


def admit(state: SchedulerState, request: Request, plan: AllocationPlan) -> None:
    """Move a request from waiting to running; give it rows and blocks. Metrics record the first admission."""
    state.waiting.remove(request)
    _seat(state, request)
    state.kv.allocate(plan)
    for seq in request.live_sequences:
        assert seq.row is not None
        state.batch.set_prefilling(seq.row, seq.num_computed_tokens < seq.num_tokens_to_prefill)
    if request.metrics.first_scheduled_time is None:
        request.metrics.first_scheduled_time = state.clock.now()
        request.metrics.num_cached_tokens = plan.num_cached_tokens
        state.num_cached_tokens += plan.num_cached_tokens
        state.policies.admitted(request)


def preempt(state: SchedulerState, request: Request, mode: PreemptionMode, for_request: Request) -> BlockPairs:
    """Move a request from running to waiting (recompute) or to swapped (swap). The request keeps its output.

    Returns the pairs (device block, host block) to copy.
    """
    pairs: BlockPairs = []
    for seq in request.live_sequences:
        seq.num_ever_computed_tokens = max(seq.num_ever_computed_tokens, seq.num_computed_tokens)
    if mode is PreemptionMode.SWAP:
        pairs = state.kv.swap_out(request)
        _unseat(state, request)
        request.status = RequestStatus.SWAPPED
        state.swapped.add(request)
    else:
        for seq in request.live_sequences:
            state.kv.free(seq)
        _unseat(state, request)
        _wait_again(state, request)
    request.waiting_since = state.clock.now()
    request.metrics.preemptions.append(PreemptionRecord(state.step, mode.value, for_request.request_id))
    return pairs


def swap_in(state: SchedulerState, request: Request) -> BlockPairs:
    """Move a request from swapped to running; give it rows and blocks.

    Returns the pairs (host block, device block) to copy.
    """
    state.swapped.remove(request)
    _seat(state, request)
    pairs = state.kv.swap_in(request)
    for seq in request.live_sequences:
        assert seq.row is not None
        decodes = request.is_forked and seq.num_computed_tokens == seq.num_tokens - 1
        state.batch.set_prefilling(seq.row, not decodes)
    return pairs


def recompute_lost(state: SchedulerState, request: Request) -> None:
    """Return a request to waiting, to be recomputed, after a step failed that was to move its blocks."""
    if request.status is RequestStatus.SWAPPED:
        state.swapped.remove(request)
        for seq in request.live_sequences:
            state.kv.free_host(seq)
    else:
        for seq in request.live_sequences:
            seq.num_ever_computed_tokens = max(seq.num_ever_computed_tokens, seq.num_computed_tokens)
            seq.set_num_computed_tokens(0)  # keeps its blocks out of the prefix cache
            state.kv.free(seq)
        _unseat(state, request)
    _wait_again(state, request)


def computed(state: SchedulerState, seq: Sequence, num_tokens: int) -> None:
    """Record that the KV of the first `num_tokens` tokens of `seq`, known at its admission, is written.

    Sequences that waited for tokens shared with `seq` become ready.
    """
    seq.set_num_computed_tokens(num_tokens)
    state.kv.index_computed(seq, num_tokens)
    _end_prefill_if_done(state, seq)
    if seq.request.sampling_params.n == 1:
        return
    for other in seq.request.live_sequences:
        if other.shares is not None and other.shares[0] is seq and other.shares[1] <= num_tokens:
            other.set_num_computed_tokens(other.shares[1])
            other.shares = None
            _end_prefill_if_done(state, other)


def _end_prefill_if_done(state: SchedulerState, seq: Sequence) -> None:
    assert seq.row is not None
    if seq.num_computed_tokens == seq.num_tokens_to_prefill:
        state.batch.set_prefilling(seq.row, False)


def fork(state: SchedulerState, request: Request, count: int) -> list[Sequence]:
    """Fork the single sequence of a request into `count` sequences that share its blocks; return all of them."""
    (lead,) = request.sequences
    children = [Sequence(request, i, lead.token_ids.copy(), lead.num_computed_tokens) for i in range(1, count)]
    request.sequences += children
    state.batch.reserve_seats(request, max(0, request.sampling_params.n - count))
    for child in children:
        state.batch.add(child, token_limit(state, request))
        state.kv.fork(lead, child)
    return request.sequences


def end_sequence(
    state: SchedulerState,
    seq: Sequence,
    reason: FinishReason,
    stop_reason: int | str | None = None,
) -> None:
    """End one sequence and free its row and blocks; end the request if this was its last live sequence."""
    release(state, seq)
    seq.finish_reason = reason
    seq.stop_reason = stop_reason
    if not seq.request.live_sequences:
        leave(state, seq.request)


def end_request(
    state: SchedulerState,
    request: Request,
    reason: FinishReason,
    stop_reason: int | str | None = None,
    error: str | None = None,
) -> None:
    """End all live sequences of a request in any queue, and with them the request."""
    request.error = error
    for seq in request.live_sequences:
        release(state, seq)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
    leave(state, request)


def change_rank(state: SchedulerState, request: Request, rank: Rank) -> None:
    """Change the rank of an unfinished request and move it to the new place in its queue."""
    if request.status is RequestStatus.RUNNING:
        state.batch.change_rank(request, rank)
        return
    queue = state.waiting if request.status is RequestStatus.WAITING else state.swapped
    queue.remove(request)
    request.rank = rank
    queue.add(request)


def _seat(state: SchedulerState, request: Request) -> None:
    batch = state.batch
    limit = token_limit(state, request)
    sequences = request.live_sequences
    for seq in sequences:
        batch.add(seq, limit)
    batch.reserve_seats(request, request.num_seats - len(sequences))
    batch.num_groups += request.sampling_params.n > 1
    if request.lora is not None:
        adapter = request.lora.lora_int_id
        state.adapters[adapter] = state.adapters.get(adapter, 0) + 1
    request.status = RequestStatus.RUNNING


def _unseat(state: SchedulerState, request: Request) -> None:
    for seq in request.live_sequences:
        state.batch.remove(seq)
    _give_up_seats(state, request)


def _give_up_seats(state: SchedulerState, request: Request) -> None:
    state.batch.reserve_seats(request, 0)
    state.batch.num_groups -= request.sampling_params.n > 1
    if request.lora is not None:
        adapter = request.lora.lora_int_id
        state.adapters[adapter] -= 1
        if not state.adapters[adapter]:
            del state.adapters[adapter]


def _wait_again(state: SchedulerState, request: Request) -> None:
    for seq in request.live_sequences:
        seq.set_num_computed_tokens(0)
        seq.shares = None
    request.status = RequestStatus.WAITING
    state.waiting.add(request)


def release(state: SchedulerState, seq: Sequence) -> None:
    """Take row and blocks from a sequence; the blocks may be in either tier."""
    if seq.row is not None:
        state.kv.free(seq)
        state.batch.remove(seq)
    elif seq in state.kv.host_tables:
        state.kv.free_host(seq)
    seq.shares = None
    metrics = seq.request.metrics
    if not math.isnan(seq.last_token_time):
        metrics.last_token_time = max(seq.last_token_time, metrics.last_token_time or 0.0)


def leave(state: SchedulerState, request: Request) -> None:
    """Take a request out of its queue after all its sequences have ended and been released."""
    if request.status is RequestStatus.WAITING:
        state.waiting.remove(request)
    elif request.status is RequestStatus.SWAPPED:
        state.swapped.remove(request)
    else:
        _give_up_seats(state, request)
    state.beams.pop(request, None)
    request.status = RequestStatus.FINISHED
    request.metrics.finished_time = state.clock.now()
    del state.requests[request.request_id]
    state.finished[request.request_id] = request
    state.policies.ended(request)
