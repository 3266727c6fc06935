"""Beam search: which continuations stay, and when the search is over. No blocks, no rows.

Scores are those of Wu et al. 2016 as Hugging Face's and vLLM's searches use them: a sequence's summed
log-probability divided by (number of its output tokens) ** length_penalty.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from treadle.core.request import FinishReason, IntArray
from treadle.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam with one more token.

    Attributes:
        parent: number of the beam among those before.
        token_id: the token.
        cumulative_logprob: of the whole output.
    """

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        token_ids: prompt and output.
        cumulative_logprob: of the output.
        score: what the search compares.
        finish_reason, stop_reason: why it ended.
    """

    token_ids: IntArray
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


def num_candidates(params: SamplingParams, num_stop_ids: int) -> int:
    """Candidates that each beam needs, so that `n` go on even if every stop id is among the best."""
    return params.n * max(2, 1 + num_stop_ids)


def select(
    cumulative_logprobs: AbstractSequence[float],
    candidates: AbstractSequence[AbstractSequence[tuple[int, float]]],
    width: int,
    stop_ids: frozenset[int],
) -> tuple[list[Continuation], list[Continuation]]:
    """The continuations that go on and those that end, best first.

    Args:
        cumulative_logprobs: of each beam.
        candidates: for each beam (token, log-probability), best first.
        width: beams to go on with.
        stop_ids: tokens that end a sequence; they count only among the `width` best.
    """
    everything = [
        Continuation(parent, token_id, cumulative_logprobs[parent] + logprob)
        for parent, beam in enumerate(candidates)
        for token_id, logprob in beam
        if logprob > float("-inf")
    ]
    everything.sort(key=lambda c: (-c.cumulative_logprob, c.parent, c.token_id))
    going_on: list[Continuation] = []
    ending: list[Continuation] = []
    for place, continuation in enumerate(everything):
        if continuation.token_id in stop_ids:
            if place < width:
                ending.append(continuation)
        else:
            going_on.append(continuation)
            if len(going_on) == width:
                break
    return going_on, ending


class BeamSearch:
    """The finished sequences of one search.

    Args:
        params: width (`n`), length_penalty, early_stopping.
        max_output_tokens: longest output.
    """

    def __init__(self, params: SamplingParams, max_output_tokens: int) -> None:
        self._params = params
        self._max_output_tokens = max_output_tokens
        self.finished: list[Hypothesis] = []

    def score(self, cumulative_logprob: float, num_output_tokens: int) -> float:
        """What the search compares: the length-normalized log-probability."""
        return float(cumulative_logprob / num_output_tokens**self._params.length_penalty)

    def add(
        self,
        token_ids: IntArray,
        num_output_tokens: int,
        cumulative_logprob: float,
        finish_reason: FinishReason,
        stop_reason: int | None = None,
    ) -> None:
        """Keep a finished sequence if it is among the best."""
        score = self.score(cumulative_logprob, num_output_tokens)
        self.finished.append(Hypothesis(token_ids, cumulative_logprob, score, finish_reason, stop_reason))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self._params.n :]

    def is_over(self, best_live_logprob: float, num_output_tokens: int) -> bool:
        """Whether the search ends, given the best beam that goes on and the beams' length."""
        if len(self.finished) < self._params.n:
            return False
        if self._params.early_stopping is True:
            return True
        # Log-probabilities only fall. A positive length penalty favours long outputs: the best that a beam
        # could still reach is its present sum at the greatest length.
        reach = num_output_tokens
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            reach = self._max_output_tokens
        return self.finished[-1].score >= self.score(best_live_logprob, reach)
