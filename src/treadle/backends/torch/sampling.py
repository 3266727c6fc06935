"""Sampling with plain torch, on any device: the counterpart of the native sampling kernels."""

import numpy as np
import numpy.typing as npt
import torch

from treadle.backends.inputs import Rows
from treadle.core.request import IntArray
from treadle.scheduler.plan import TokenLogprobs

CANDIDATES = 1024
"""Filters first look at this many most likely tokens, and sort the whole vocabulary only if these are not enough."""


class TorchSampling:
    """SamplingKernels in torch."""

    @torch.inference_mode()
    def draw(
        self,
        values: torch.Tensor,
        place: IntArray,
        table: Rows,
        rows: IntArray,
        noise: npt.NDArray[np.float64],
    ) -> IntArray:
        """A token for each entry: int32 [n]."""
        sampling = table.sampling
        token_ids = np.empty(len(rows), dtype=np.int32)
        greedy = np.flatnonzero(sampling.is_greedy[rows])
        if len(greedy):
            best = values[_index(place[greedy], values)].argmax(dim=-1)
            token_ids[greedy] = best.cpu().numpy()
        drawn = np.flatnonzero(~sampling.is_greedy[rows])
        if len(drawn):
            own = values[_index(place[drawn], values)]
            token_ids[drawn] = _draw(own, table, rows[drawn], noise[drawn])
        return token_ids

    @torch.inference_mode()
    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probability and rank of a token, and the most likely ones, for each entry."""
        logprobs = values[_index(place, values)].log_softmax(dim=-1)
        return [_token_logprobs(logprobs[i], int(token_ids[i]), int(num_top[i])) for i in range(len(place))]

    @torch.inference_mode()
    def penalize(self, values: torch.Tensor, place: IntArray, table: Rows, rows: IntArray) -> None:
        """Apply the rows' penalties to their logits, in place."""
        for i, row in enumerate(rows.tolist()):
            _penalize(values[place[i]], table, row)


def _index(place: IntArray, values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(place).to(values.device)


def _token_logprobs(logprobs: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of a token, and the `num_top` most likely ones.

    Args:
        logprobs: float32 [V], of one position.
        token_id: the token at that position.
        num_top: how many of the most likely tokens.
    """
    own = logprobs[token_id]
    values, ids = logprobs.topk(num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(own),
        rank=int((logprobs > own).sum()) + 1,
        top_token_ids=tuple(ids.tolist()),
        top_logprobs=tuple(values.tolist()),
    )


def _penalize(logits: torch.Tensor, table: Rows, row: int) -> None:
    """Apply one row's penalties to its logits, float32 [V], in place.

    Repetition: over prompt and output, a positive logit is divided, a negative one multiplied (Keskar et al.
    2019). Presence and frequency: over the output, a constant and a multiple of the count are subtracted.
    """
    sampling = table.sampling
    repetition = float(sampling.repetition_penalty[row])
    presence, frequency = float(sampling.presence_penalty[row]), float(sampling.frequency_penalty[row])
    token_ids = table.token_ids[row, : table.num_tokens[row]]
    if repetition != 1.0:
        seen = _index(np.unique(token_ids), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        ids, counts = np.unique(token_ids[table.num_prompt_tokens[row] :], return_counts=True)
        penalty = presence + frequency * counts.astype(np.float32)
        logits[_index(ids, logits)] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)


def _draw(logits: torch.Tensor, table: Rows, rows: IntArray, noise: npt.NDArray[np.float64]) -> IntArray:
    """Draw one token per row: float32 [n, V], float64 [n] → int32 [n]."""
    sampling = table.sampling
    temperature = torch.from_numpy(sampling.temperature[rows]).to(logits.device)
    logits = logits / temperature[:, None]
    filtered = np.flatnonzero(sampling.filters[rows])
    if len(filtered):
        index = torch.from_numpy(filtered).to(logits.device)
        logits[index] = filter_logits(
            logits[index],
            sampling.top_k[rows[filtered]],
            sampling.top_p[rows[filtered]],
            sampling.min_p[rows[filtered]],
        )
    # float64, because float32 is not precise enough for a sum over a whole vocabulary.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    targets = torch.from_numpy(noise).to(logits.device)[:, None] * cumulative[:, -1:]
    # The first id whose cumulative probability exceeds the target; one with probability 0 never does.
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return drawn.clamp_(max=logits.shape[1] - 1).cpu().numpy().astype(np.int32)


def filter_logits(
    logits: torch.Tensor,
    top_k: IntArray,
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Logits with -inf for tokens that top_k, then top_p, or min_p drop: float32 [n, V].

    Each filter becomes a threshold on the logit, so tokens with equal logits are kept or dropped together
    and the result does not depend on the order in which ties are sorted.

    Args:
        logits: float32 [n, V], after temperature.
        top_k: int32 [n], 0 for all.
        top_p, min_p: float32 [n].
    """
    vocab_size = logits.shape[1]
    result = logits.clone()
    num_candidates = min(CANDIDATES, vocab_size)
    best = logits.topk(num_candidates, dim=-1).values  # [n, candidates], descending
    for i in range(logits.shape[0]):
        candidates = best[i]
        k = int(top_k[i]) or vocab_size
        if k > num_candidates:
            candidates = logits[i].sort(descending=True).values
        k = min(k, vocab_size)
        threshold = candidates[k - 1]
        if min_p[i] > 0.0:
            # p ≥ min_p × p_max, in logarithms.
            threshold = torch.maximum(threshold, candidates[0] + float(np.log(min_p[i])))
        if top_p[i] < 1.0:
            threshold = torch.maximum(threshold, _top_p_threshold(logits[i], candidates, k, float(top_p[i])))
        result[i].masked_fill_(logits[i] < threshold, -torch.inf)
    return result


def _top_p_threshold(logits: torch.Tensor, candidates: torch.Tensor, k: int, top_p: float) -> torch.Tensor:
    """Logit of the last token of the smallest set of most likely ones whose probability reaches `top_p`.

    Args:
        logits: [V].
        candidates: the highest logits, descending.
        k: how many tokens top_k has kept.
        top_p: share of their probability.
    """
    if k < logits.shape[0]:
        kept = candidates[:k]
        probabilities = kept.double().softmax(dim=-1)
    else:
        probabilities = (candidates.double() - logits.double().logsumexp(dim=-1)).exp()
        if float(probabilities.sum()) < top_p:
            candidates = logits.sort(descending=True).values
            probabilities = candidates.double().softmax(dim=-1)
    reached = torch.searchsorted(probabilities.cumsum(dim=-1), torch.tensor(top_p, dtype=torch.float64))
    return candidates[min(int(reached), len(probabilities) - 1)]
