"""Beam search: selects the continuations and decides when the search ends. Knows nothing of blocks and rows.

The score follows Wu et al. 2016, as implemented by Hugging Face Transformers and vLLM: the summed log-probability
of the output divided by (number of output tokens) ** length_penalty.
"""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from treadle.core.request import FinishReason, IntArray
from treadle.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam with one more token.

    Attributes:
        parent: index of the beam among the current beams.
        token_id: the new token.
        cumulative_logprob: log-probability of the whole output, the new token included.
    """

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
        token_ids: int32 [num_tokens], prompt and output.
        cumulative_logprob: log-probability of the output.
        score: length-normalized log-probability, see `BeamSearch.score`.
        finish_reason, stop_reason: why the sequence ended.
    """

    token_ids: IntArray
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None


def num_candidates(params: SamplingParams, num_stop_ids: int) -> int:
    """Return how many candidates each beam needs so that `n` beams remain even if every stop id is among the best."""
    return params.n * max(2, 1 + num_stop_ids)


def select(
    cumulative_logprobs: AbstractSequence[float],
    candidates: AbstractSequence[AbstractSequence[tuple[int, float]]],
    width: int,
    stop_ids: frozenset[int],
) -> tuple[list[Continuation], list[Continuation]]:
    """Select the continuations that become the next beams and those that end their sequence, both best first.

    Args:
        cumulative_logprobs: log-probability of each beam's output.
        candidates: (token, log-probability) for each beam, best first.
        width: number of beams to keep.
        stop_ids: tokens that end a sequence. A continuation that ends with one counts only if it is among the
            `width` best.
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
        params: sampling parameters; the search uses `n` (its width), `length_penalty` and `early_stopping`.
        max_output_tokens: maximum number of output tokens in a sequence.
    """

    def __init__(self, params: SamplingParams, max_output_tokens: int) -> None:
        self._params = params
        self._max_output_tokens = max_output_tokens
        self.finished: list[Hypothesis] = []

    def score(self, cumulative_logprob: float, num_output_tokens: int) -> float:
        """Return the length-normalized log-probability, by which the search ranks sequences."""
        return float(cumulative_logprob / num_output_tokens**self._params.length_penalty)

    def add(
        self,
        token_ids: IntArray,
        num_output_tokens: int,
        cumulative_logprob: float,
        finish_reason: FinishReason,
        stop_reason: int | None = None,
    ) -> None:
        """Add a finished sequence; only the `n` best are kept."""
        score = self.score(cumulative_logprob, num_output_tokens)
        self.finished.append(Hypothesis(token_ids, cumulative_logprob, score, finish_reason, stop_reason))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self._params.n :]

    def is_over(self, best_live_logprob: float, num_output_tokens: int) -> bool:
        """Whether the search can end.

        Args:
            best_live_logprob: cumulative log-probability of the best live beam.
            num_output_tokens: number of output tokens of the live beams, which all have the same length.
        """
        if len(self.finished) < self._params.n:
            return False
        if self._params.early_stopping is True:
            return True
        # A cumulative log-probability never rises. With a positive length penalty, which favours long outputs, an
        # upper bound of a beam's score is therefore its present log-probability at the maximum length.
        reach = num_output_tokens
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            reach = self._max_output_tokens
        return self.finished[-1].score >= self.score(best_live_logprob, reach)
