"""One step of a beam search, on rows and blocks: the best continuations replace the beams."""

import numpy as np

from treadle.core.request import FinishReason, IntArray, Request, Sequence
from treadle.scheduler.beams import BeamSearch, Continuation, select
from treadle.scheduler.lifecycle import leave, release, token_limit
from treadle.scheduler.state import SchedulerState

Candidates = tuple[tuple[int, float], ...]
"""(token, log-probability), best first."""


def advance(state: SchedulerState, request: Request, answers: list[tuple[Sequence, Candidates]]) -> int:
    """Replace the beams with the best continuations, or end the search; return the number of generated tokens.

    Args:
        state: the scheduler's state.
        request: a request that uses beam search.
        answers: each beam with the runner's candidates for its next token.
    """
    now = state.clock.now()
    if request.metrics.first_token_time is None:
        request.metrics.first_token_time = now
    search = _search(state, request)
    beams = [seq for seq, _ in answers]
    for beam in beams:
        beam.last_token_time = now
    going_on, ending = select(
        [seq.cumulative_logprob for seq in beams],
        [candidates for _, candidates in answers],
        request.sampling_params.n,
        request.stop_token_ids,
    )
    num_outputs = beams[0].num_output_tokens + 1
    named = request.sampling_params.stop_token_ids or ()
    for c in ending:
        stop_reason = c.token_id if c.token_id in named else None
        search.add(_token_ids(beams, c), num_outputs, c.cumulative_logprob, FinishReason.STOP, stop_reason)
    at_limit = beams[0].num_tokens + 1 >= token_limit(state, request)
    is_over = not going_on or search.is_over(going_on[0].cumulative_logprob, num_outputs)
    if at_limit and not is_over:
        for c in going_on:
            search.add(_token_ids(beams, c), num_outputs, c.cumulative_logprob, FinishReason.LENGTH)
        is_over = True
    if is_over:
        _end(state, request)
    else:
        _replace(state, request, beams, going_on)
    return len(going_on) + len(ending)


def _token_ids(beams: list[Sequence], continuation: Continuation) -> IntArray:
    """Return the tokens of a continuation, the parent's tokens and the new one: int32 [num_tokens + 1]."""
    return np.append(beams[continuation.parent].token_ids, np.int32(continuation.token_id))


def _search(state: SchedulerState, request: Request) -> BeamSearch:
    """Return the request's beam search; create it in the first step."""
    search = state.beams.get(request)
    if search is None:
        longest = token_limit(state, request) - len(request.prompt_token_ids)
        search = state.beams[request] = BeamSearch(request.sampling_params, longest)
    return search


def _replace(
    state: SchedulerState, request: Request, beams: list[Sequence], continuations: list[Continuation]
) -> None:
    """Replace the beams of a search with its continuations.

    Args:
        state: the scheduler's state.
        request: the request that uses beam search.
        beams: its current beams; `Continuation.parent` is an index into them.
        continuations: the beams of the next step, at most `n`.
    """
    sequences = list(beams)
    while len(sequences) < len(continuations):
        beam = Sequence(request, len(sequences), beams[0].token_ids.copy(), beams[0].num_computed_tokens)
        beam.last_token_time = beams[0].last_token_time
        state.batch.add(beam, token_limit(state, request))
        state.kv.fork(beams[0], beam)
        sequences.append(beam)
    parents = [beams[c.parent] for c in continuations]
    tokens = [_token_ids(beams, c) for c in continuations]
    computed = [parent.num_computed_tokens for parent in parents]
    request.sequences = sequences[: len(continuations)]
    state.kv.reassign(request.sequences, parents)
    for seq, c, token_ids, num_computed in zip(request.sequences, continuations, tokens, computed, strict=True):
        seq.replace_tokens(token_ids, num_computed)
        assert seq.row is not None
        state.batch.resend_row(seq.row)
        seq.cumulative_logprob = c.cumulative_logprob
    for seq in sequences[len(continuations) :]:
        release(state, seq)
    state.batch.reserve_seats(request, request.sampling_params.n - len(request.sequences))


def _end(state: SchedulerState, request: Request) -> None:
    """End a beam search: replace the beams with the finished sequences, best first."""
    for seq in request.live_sequences:
        release(state, seq)
    request.sequences = []
    for i, hypothesis in enumerate(state.beams[request].finished):
        seq = Sequence(request, i, hypothesis.token_ids)
        seq.cumulative_logprob = hypothesis.cumulative_logprob
        seq.finish_reason = hypothesis.finish_reason
        seq.stop_reason = hypothesis.stop_reason
        request.sequences.append(seq)
    leave(state, request)
