"""Chooses tokens from logits.

Per row: edit (allowed ids, end ids before min_tokens, bias, penalties) → greedy, or temperature → filter
(top_k, top_p, min_p) → draw. Log-probabilities are those of the untouched logits, as in vLLM.
What only some rows ask for is done for those rows only.
"""

import numpy as np
import numpy.typing as npt
import torch

from treadle.request import IntArray
from treadle.runner.noise import uniform
from treadle.sampling_params import SamplingParams
from treadle.scheduler import RunningBatch, TokenLogprobs

LOGIT_BIAS_LIMIT = 100.0
CANDIDATES = 1024
"""Filters first look at this many most likely tokens; only where these do not decide they sort all."""


class Sampler:
    """Chooses one token per row of logits."""

    def sample(
        self,
        logits: torch.Tensor,
        batch: RunningBatch,
        rows: IntArray,
        sequence_index: IntArray | None = None,
    ) -> tuple[IntArray, dict[int, TokenLogprobs]]:
        """Choose a token for each row of logits.

        Args:
            logits: float32 [n, V]; changed.
            batch: the rows' arrays.
            rows: int32 [n], whose logits these are; a row may stand there several times.
            sequence_index: int32 [n], for which sequence of its request each token is; the row's own if None.

        Returns:
            int32 [n], and place → log-probabilities for rows that asked.
        """
        if sequence_index is None:
            sequence_index = batch.sampling.sequence_index[rows]
        sampling = batch.sampling
        raw = None
        wanting = np.flatnonzero(sampling.wants_logprobs[rows])
        if len(wanting):
            raw = logits[torch.from_numpy(wanting).to(logits.device)].log_softmax(dim=-1)
        for i in np.flatnonzero(sampling.edits_logits[rows]).tolist():
            _edit_logits(logits[i], batch, int(rows[i]))
        token_ids = logits.argmax(dim=-1).cpu().numpy().astype(np.int32)
        drawn = np.flatnonzero(~sampling.is_greedy[rows])
        if len(drawn):
            index = torch.from_numpy(drawn).to(logits.device)
            token_ids[drawn] = _draw(logits[index], batch, rows[drawn], sequence_index[drawn])
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            for k, i in enumerate(wanting.tolist()):
                num_top = batch.sequences[rows[i]].request.sampling_params.logprobs
                logprobs[i] = token_logprobs(raw[k], int(token_ids[i]), num_top)
        return token_ids, logprobs

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
        if batch.sampling.edits_logits[row]:
            _edit_logits(logits, batch, row)
        values, ids = logits.log_softmax(dim=-1).topk(min(count, logits.shape[0]))
        return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def token_logprobs(logprobs: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of a token, and the `num_top` most likely ones.

    Args:
        logprobs: float32 [V], of one position.
        token_id: the token that stands there.
        num_top: how many others.
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


def _edit_logits(logits: torch.Tensor, batch: RunningBatch, row: int) -> None:
    """Apply what a request asks for to its logits, float32 [V], in place."""
    seq = batch.sequences[row]
    params = seq.request.sampling_params
    device = logits.device
    if params.allowed_token_ids is not None:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[torch.tensor(list(params.allowed_token_ids), device=device)] = False
        logits.masked_fill_(forbidden, -torch.inf)
    if seq.num_output_tokens < params.min_tokens and seq.request.stop_token_ids:
        ends = torch.tensor(sorted(seq.request.stop_token_ids), device=device)
        logits[ends] = -torch.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias.keys()), device=device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        logits[ids] += bias.clamp(-LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT)
    _penalize(logits, params, seq.token_ids, seq.num_prompt_tokens)


def _penalize(logits: torch.Tensor, params: SamplingParams, token_ids: IntArray, num_prompt_tokens: int) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(token_ids).astype(np.int64)).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(token_ids[num_prompt_tokens:], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
        logits[torch.from_numpy(ids.astype(np.int64)).to(logits.device)] -= torch.from_numpy(
            penalty.astype(np.float32)
        ).to(logits.device)


def _draw(logits: torch.Tensor, batch: RunningBatch, rows: IntArray, sequence_index: IntArray) -> IntArray:
    """Draw one token per row: float32 [n, V] → int32 [n].

    The draw inverts the cumulative distribution over token ids, so that equal logits and equal noise give
    an equal token, and the order in which filters sorted the tokens does not matter.
    """
    sampling = batch.sampling
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
    # float64: the sum over a whole vocabulary must not run out of digits.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    noise = uniform(
        sampling.seed[rows],
        sequence_index,
        np.array([batch.sequences[row].num_output_tokens for row in rows], dtype=np.int64),
    )
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
        k: tokens that top_k has left.
        top_p: share of the probability of those.
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
