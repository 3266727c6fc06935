"""Applies a step's result to the requests: appends tokens, forks and ends sequences, replaces beams."""

import numpy as np
import numpy.typing as npt

from treadle.core.request import FinishReason, IntArray, Request, Sequence, TimeArray
from treadle.scheduler import beam_step, lifecycle
from treadle.scheduler.batch import rows_of
from treadle.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from treadle.scheduler.report import StepOutputs
from treadle.scheduler.state import SchedulerState

ObjectArray = npt.NDArray[np.object_]


def take_result(state: SchedulerState, plan: StepPlan, result: StepResult) -> StepOutputs:
    """Apply the result of `plan` to the requests.

    Args:
        state: the scheduler's state; its running requests are unchanged since the step was planned.
        plan: the step.
        result: the runner's answer.
    """
    batch = state.batch
    planned: ObjectArray = batch.sequences.take(plan.rows)
    awaiting_first: list[Request] = []
    num_first = num_recomputed = 0
    if plan.num_prefills or plan.candidates is not None:
        awaiting_first = _awaiting_first_token(plan, planned)
    rows, sequences = plan.decode_rows, planned
    if plan.num_prefills:
        targets, num_first, num_recomputed = _take_prefills(state, plan, planned)
        rows = np.concatenate([rows_of(targets), rows])
        sequences = _objects([*targets, *planned[plan.num_prefills : plan.num_prefills + plan.num_decodes]])
    elif plan.candidates is not None:
        sequences = planned[: plan.num_decodes]
    token_ids, logprobs, gaps = result.token_ids, result.logprobs, np.empty(0)
    if len(rows):
        now = state.clock.now()
        for request in awaiting_first:
            if not request.sampling_params.use_beam_search:
                request.metrics.first_token_time = now
        gaps = now - batch.last_token_times.take(rows)
        if result.num_accepted is None:
            _append(state, rows, token_ids, sequences, now)
        else:
            num_targets = len(rows) - plan.num_decodes
            num_tokens = np.concatenate([np.ones(num_targets, dtype=np.int32), result.num_accepted])
            sequences, token_ids, logprobs = _append_rounds(state, rows, num_tokens, sequences, result, now)
    num_generated = len(token_ids)
    if plan.candidates is not None:
        more, beam_gaps = _take_beams(state, plan, result, planned)
        num_generated += more
        gaps = np.concatenate([gaps, beam_gaps])
    for row, error in result.errors:
        for seq in planned[plan.rows == row]:
            _fail_request(state, seq, error)
    batch.drafts = {row: draft for row, draft in result.drafts.items() if batch.sequences[row] is not None}
    waits = (request.metrics.time_to_first_token for request in awaiting_first)
    return StepOutputs(
        sequences=sequences,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=tuple(
            (planned[i].request, int(plan.starts[i]) + 1, entries) for i, entries in result.prompt_logprobs.items()
        ),
        num_generated_tokens=num_generated,
        num_prompt_tokens=num_first,
        num_recomputed_tokens=num_recomputed,
        num_cached_tokens=state.num_cached_tokens,
        token_gaps=gaps,
        first_token_waits=tuple(wait for wait in waits if wait is not None),
    )


def _objects(sequences: list[Sequence]) -> ObjectArray:
    array = np.empty(len(sequences), dtype=np.object_)
    array[:] = sequences
    return array


def _awaiting_first_token(plan: StepPlan, planned: ObjectArray) -> list[Request]:
    """Requests that get their first token in this step."""
    wants = plan.samples > 0 if plan.candidates is None else (plan.samples > 0) | (plan.candidates > 0)
    requests = dict.fromkeys(seq.request for seq in planned[wants])
    return [request for request in requests if request.metrics.first_token_time is None]


def _take_prefills(state: SchedulerState, plan: StepPlan, planned: ObjectArray) -> tuple[list[Sequence], int, int]:
    """Record the computed tokens of the prefills, and fork the requests that sample several sequences.

    Returns:
        The sequences that get a token, in the result's order; the number of prompt tokens computed for the first
        time; and the number of known tokens computed again.
    """
    targets: list[Sequence] = []
    num_first = num_recomputed = 0
    for i in range(plan.num_prefills):
        seq: Sequence = planned[i]
        start, count, num_samples = int(plan.starts[i]), int(plan.counts[i]), int(plan.samples[i])
        num_recomputed += min(max(seq.num_ever_computed_tokens - start, 0), count)
        # The last token sampled before a preemption is neither a prompt token nor computed before.
        num_first += max(min(start + count, seq.num_prompt_tokens) - max(start, seq.num_ever_computed_tokens), 0)
        lifecycle.computed(state, seq, start + count)
        if num_samples == 1:
            targets.append(seq)
        elif num_samples:
            targets += lifecycle.fork(state, seq.request, num_samples)
    return targets, num_first, num_recomputed


def _append(state: SchedulerState, rows: IntArray, token_ids: IntArray, sequences: ObjectArray, now: float) -> None:
    """Append one token to each of the distinct `rows`, and end the sequences that have reached their end."""
    batch = state.batch
    ended = batch.append_tokens(rows, token_ids, now)
    for i in np.flatnonzero(ended).tolist():
        _end_by_token(state, sequences[i], int(token_ids[i]))


def _append_rounds(
    state: SchedulerState,
    rows: IntArray,
    num_tokens: IntArray,
    sequences: ObjectArray,
    result: StepResult,
    now: float,
) -> tuple[ObjectArray, IntArray, dict[int, TokenLogprobs]]:
    """Append one or more tokens to each row, in rounds: the first token of every row, then the second, and so on.

    Args:
        state: the scheduler's state.
        rows: int32 [n].
        num_tokens: int32 [n], number of tokens for each row.
        sequences: object [n], the sequences of `rows`.
        result: the runner's answer; its tokens are ordered by row.
        now: seconds on the engine's clock.

    Returns:
        The sequence of each token and the tokens, without those after the end of a sequence, and the
        log-probabilities by index into them.
    """
    batch = state.batch
    first = num_tokens.cumsum() - num_tokens
    is_kept = np.zeros(len(result.token_ids), dtype=np.bool_)
    for i in range(int(num_tokens.max())):
        alive = [k for k in np.flatnonzero(num_tokens > i).tolist() if sequences[k].row is not None]
        places = first[alive] + i
        is_kept[places] = True
        _append(state, rows[alive], result.token_ids[places], sequences[alive], now)
    drafting = np.array([row for row in rows[num_tokens > 0].tolist() if batch.sequences[row]], dtype=np.int32)
    state.kv.trim(drafting, batch.num_tokens[drafting])
    new_places = is_kept.cumsum() - 1
    logprobs = {int(new_places[k]): entry for k, entry in result.logprobs.items() if is_kept[k]}
    return np.repeat(sequences, num_tokens)[is_kept], result.token_ids[is_kept], logprobs


def _take_beams(
    state: SchedulerState, plan: StepPlan, result: StepResult, planned: ObjectArray
) -> tuple[int, TimeArray]:
    """Advance every beam search; return the number of generated tokens and the token gaps of the beams."""
    searches: dict[Request, list[tuple[Sequence, tuple[tuple[int, float], ...]]]] = {}
    now, gaps = state.clock.now(), []
    for i in range(plan.num_prefills + plan.num_decodes, len(plan.rows)):
        planned[i].set_num_computed_tokens(int(plan.starts[i]) + 1)
    for i, candidates in result.candidates.items():
        searches.setdefault(planned[i].request, []).append((planned[i], candidates))
        gaps.append(now - planned[i].last_token_time)
    num_generated = sum(beam_step.advance(state, request, answers) for request, answers in searches.items())
    return num_generated, np.array(gaps)


def _end_by_token(state: SchedulerState, seq: Sequence, token_id: int) -> None:
    request = seq.request
    if token_id in request.stop_token_ids:
        named = request.sampling_params.stop_token_ids or ()
        lifecycle.end_sequence(state, seq, FinishReason.STOP, token_id if token_id in named else None)
    else:
        lifecycle.end_sequence(state, seq, FinishReason.LENGTH)


def _fail_request(state: SchedulerState, seq: Sequence, error: str) -> None:
    """End the request of a sequence that failed in the runner, even if this step's token has already ended it."""
    request = seq.request
    if seq.is_finished:
        seq.finish_reason = FinishReason.ERROR
    if request.is_finished:
        request.error = error
    else:
        lifecycle.end_request(state, request, FinishReason.ERROR, error=error)
