"""Chooses tokens from logits.

Per row: edit (grammar, allowed ids, end ids before min_tokens, bias, penalties) → greedy, or temperature → filter
(top_k, top_p, min_p) → draw. Log-probabilities are those of the untouched logits, as in vLLM.
What only some rows ask for is done for those rows only.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from treadle.request import IntArray
from treadle.runner.grammar_masks import GrammarMasks
from treadle.runner.noise import uniform
from treadle.scheduler import RunningBatch, TokenLogprobs

LOGIT_BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What the model says about the next token at some places of a step.

    Attributes:
        values: float32 [m, V], logits of the places that were wanted.
        place: int32 [n], row of `values` for each place asked about, -1 where logits were not wanted.
        best: int32 [n], the most likely token of each place.
    """

    values: torch.Tensor
    place: IntArray
    best: IntArray


class SamplingKernels(Protocol):
    """What the sampler does to whole rows of logits. `place` says which row of `values` each entry has."""

    def draw(
        self,
        values: torch.Tensor,
        place: IntArray,
        batch: RunningBatch,
        rows: IntArray,
        noise: npt.NDArray[np.float64],
    ) -> IntArray:
        """A token for each entry: int32 [n].

        A greedy row takes the most likely one. For the others the draw inverts the cumulative distribution
        over token ids, so that equal logits and equal noise give an equal token.

        Args:
            values: float32 [.., V].
            place: int32 [n].
            batch, rows: whose parameters hold, int32 [n].
            noise: float64 [n], in [0, 1).
        """
        ...

    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probability and rank of a token, and the most likely ones, for each entry.

        Args:
            values: float32 [.., V].
            place, token_ids: int32 [n].
            num_top: int32 [n], how many of the most likely tokens.
        """
        ...

    def penalize(self, values: torch.Tensor, place: IntArray, batch: RunningBatch, rows: IntArray) -> None:
        """Apply the rows' repetition, presence and frequency penalties to their logits, in place."""
        ...


class Sampler:
    """Chooses one token per row of logits.

    Args:
        kernels: work on whole rows.
        threads: how many find out what grammars allow; torch's number by default.
    """

    def __init__(self, kernels: SamplingKernels, threads: int | None = None) -> None:
        self._kernels = kernels
        self.grammar_masks = GrammarMasks(threads or torch.get_num_threads())

    def sample(
        self, logits: StepLogits, batch: RunningBatch, rows: IntArray, sequence_index: IntArray
    ) -> tuple[IntArray, dict[int, TokenLogprobs]]:
        """Choose a token for each place of the logits.

        Args:
            logits: of n places; their values may be changed.
            batch: the rows' arrays.
            rows: int32 [n], whose the places are; a row may stand there several times.
            sequence_index: int32 [n], for which sequence of its request each token is.

        Returns:
            int32 [n], and place → log-probabilities for rows that asked.
        """
        token_ids = logits.best
        if not len(logits.values):
            return token_ids, {}
        sampling = batch.sampling
        values, place = logits.values, logits.place
        is_edited = sampling.is_biased[rows] | sampling.is_penalized[rows]
        reported = np.flatnonzero(sampling.num_logprobs[rows] >= 0)
        raw, raw_place = values, place[reported]
        if is_edited[reported].any():
            raw, raw_place = values[torch.from_numpy(raw_place).to(values.device)], _numbers(len(reported))
        structured = np.flatnonzero(sampling.has_grammar[rows])
        if len(structured):
            self.grammar_masks.apply(values, place[structured], batch, rows[structured])
        for i in np.flatnonzero(sampling.is_biased[rows]).tolist():
            _bias(values[place[i]], batch, int(rows[i]))
        penalized = np.flatnonzero(sampling.is_penalized[rows])
        if len(penalized):
            self._kernels.penalize(values, place[penalized], batch, rows[penalized])
        drawn = np.flatnonzero(is_edited | ~sampling.is_greedy[rows])
        if len(drawn):
            own = rows[drawn]
            output_position = (batch.num_tokens[own] - batch.num_prompt_tokens[own]).astype(np.int64)
            noise = uniform(sampling.seed[own], sequence_index[drawn], output_position)
            token_ids[drawn] = self._kernels.draw(values, place[drawn], batch, own, noise)
        if not len(reported):
            return token_ids, {}
        entries = self.report(raw, raw_place, token_ids[reported], sampling.num_logprobs[rows[reported]])
        return token_ids, dict(zip(reported.tolist(), entries, strict=True))

    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probabilities of tokens, as SamplingKernels.report."""
        return self._kernels.report(values, place, token_ids, num_top)

    def candidates(
        self, logits: torch.Tensor, batch: RunningBatch, row: int, count: int
    ) -> tuple[tuple[int, float], ...]:
        """The most likely next tokens of a beam with their log-probabilities, best first.

        Args:
            logits: float32 [V]; changed by what the request asks for (biases, penalties, …).
            batch: the rows' arrays.
            row: the beam's.
            count: how many, at most V.
        """
        values, own = logits[None], np.array([row], dtype=np.int32)
        if batch.sampling.has_grammar[row]:
            self.grammar_masks.apply(values, _numbers(1), batch, own)
        if batch.sampling.is_biased[row]:
            _bias(logits, batch, row)
        if batch.sampling.is_penalized[row]:
            self._kernels.penalize(values, _numbers(1), batch, own)
        num_top = np.array([min(count, len(logits))], dtype=np.int32)
        (entry,) = self._kernels.report(values, _numbers(1), _numbers(1), num_top)
        return tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True))


def _numbers(count: int) -> IntArray:
    return np.arange(count, dtype=np.int32)


@torch.inference_mode()
def _bias(logits: torch.Tensor, batch: RunningBatch, row: int) -> None:
    """Apply allowed ids, min_tokens and biases of a request to its logits, float32 [V], in place."""
    seq = batch.sequences[row]
    params = seq.request.sampling_params
    device = logits.device
    if params.allowed_token_ids is not None:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[torch.tensor(list(params.allowed_token_ids), device=device)] = False
        logits.masked_fill_(forbidden, -torch.inf)
    if seq.num_output_tokens < params.min_tokens and seq.request.stop_token_ids:
        ends = torch.tensor(sorted(seq.request.stop_token_ids), device=device)
        end_logits = logits[ends]
        logits[ends] = -torch.inf
        if params.structured_outputs is not None and logits.max() == -torch.inf:
            logits[ends] = end_logits  # the text is complete
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias.keys()), device=device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        logits[ids] += bias.clamp(-LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT)
