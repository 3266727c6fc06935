"""Chooses tokens from logits.

Per row: edit (grammar, allowed ids, end ids before min_tokens, bias, penalties) → greedy, or temperature → filter
(top_k, top_p, min_p) → draw. Log-probabilities are those of the unedited logits, as in vLLM. Work that only some
rows need is done only for those rows.
"""

from collections.abc import Callable

import numpy as np
import torch

from treadle.backends.protocol import SamplingKernels, StepLogits
from treadle.core.request import IntArray
from treadle.runner.grammar_masks import GrammarMasks, RowErrors
from treadle.runner.noise import uniform
from treadle.runner.row_table import RowTable
from treadle.scheduler.plan import TokenLogprobs
from treadle.text.grammar import Grammar

LOGIT_BIAS_LIMIT = 100.0


class Sampler:
    """Chooses one token per row of logits.

    Args:
        kernels: operations on whole rows of logits.
        find_grammar: text of a grammar → the compiled grammar.
        threads: number of threads that compute what grammars allow.
    """

    def __init__(self, kernels: SamplingKernels, find_grammar: Callable[[str], Grammar], threads: int) -> None:
        self._kernels = kernels
        self._grammar_masks = GrammarMasks(find_grammar, threads)

    def sample(
        self, logits: StepLogits, table: RowTable, rows: IntArray, sequence_index: IntArray
    ) -> tuple[IntArray, dict[int, TokenLogprobs], RowErrors]:
        """Choose a token for each place of the logits.

        Args:
            logits: of n places; their values may be modified.
            table: the rows.
            rows: int32 [n], the row of each place; a row may occur several times.
            sequence_index: int32 [n], the sequence of its request that each token is for.

        Returns:
            The tokens, int32 [n]; place → log-probabilities, for rows that ask for them; the rows that cannot go on.
        """
        token_ids = logits.best
        if not len(logits.values):
            return token_ids, {}, ()
        sampling = table.sampling
        values, place = logits.values, logits.place
        is_edited = sampling.is_biased[rows] | sampling.is_penalized[rows]
        reported = np.flatnonzero(sampling.num_logprobs[rows] >= 0)
        raw, raw_place = values, place[reported]
        if is_edited[reported].any():
            raw, raw_place = values[torch.from_numpy(raw_place).to(values.device)], _numbers(len(reported))
        errors = self._edit(values, place, table, rows)
        drawn = np.flatnonzero(is_edited | ~sampling.is_greedy[rows])
        if len(drawn):
            own = rows[drawn]
            output_position = (table.num_tokens[own] - table.num_prompt_tokens[own]).astype(np.int64)
            noise = uniform(sampling.seed[own], sequence_index[drawn], output_position)
            token_ids[drawn] = self._kernels.draw(values, place[drawn], table, own, noise)
        if not len(reported):
            return token_ids, {}, errors
        entries = self.report(raw, raw_place, token_ids[reported], sampling.num_logprobs[rows[reported]])
        return token_ids, dict(zip(reported.tolist(), entries, strict=True)), errors

    def report(
        self, values: torch.Tensor, place: IntArray, token_ids: IntArray, num_top: IntArray
    ) -> list[TokenLogprobs]:
        """Log-probabilities of tokens, as SamplingKernels.report."""
        return self._kernels.report(values, place, token_ids, num_top)

    def candidates(
        self, logits: torch.Tensor, table: RowTable, row: int, count: int
    ) -> tuple[tuple[tuple[int, float], ...], RowErrors]:
        """Find the most likely next tokens of a beam.

        Args:
            logits: float32 [V]; modified in place by the request's biases, penalties, …
            table: the rows.
            row: the beam's row.
            count: how many, at most V.

        Returns:
            (token, log-probability), best first; the row if it cannot go on.
        """
        values = logits[None]
        errors = self._edit(values, _numbers(1), table, np.array([row], dtype=np.int32))
        num_top = np.array([min(count, len(logits))], dtype=np.int32)
        (entry,) = self._kernels.report(values, _numbers(1), _numbers(1), num_top)
        return tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)), errors

    def _edit(self, values: torch.Tensor, place: IntArray, table: RowTable, rows: IntArray) -> RowErrors:
        """Edit the rows' logits as their requests ask, in place; returns the rows that cannot go on."""
        sampling = table.sampling
        errors: RowErrors = ()
        structured = np.flatnonzero(sampling.has_grammar[rows])
        if len(structured):
            errors = self._grammar_masks.apply(values, place[structured], table, rows[structured])
        biased = np.flatnonzero(sampling.is_biased[rows])
        if len(biased):
            _bias(values, place[biased], table, rows[biased])
        penalized = np.flatnonzero(sampling.is_penalized[rows])
        if len(penalized):
            self._kernels.penalize(values, place[penalized], table, rows[penalized])
        return errors


def _numbers(count: int) -> IntArray:
    return np.arange(count, dtype=np.int32)


@torch.inference_mode()
def _bias(values: torch.Tensor, place: IntArray, table: RowTable, rows: IntArray) -> None:
    """Apply the rows' allowed ids, min_tokens and biases to their logits, in place.

    Edits that touch few logits are collected from all rows and applied together.
    """
    ends: list[tuple[int, int]] = []
    biases: list[tuple[int, int]] = []
    amounts: list[float] = []
    for i, row in zip(place.tolist(), rows.tolist(), strict=True):
        params, stop_token_ids = table.params[row], table.stop_token_ids[row]
        assert params is not None
        num_output_tokens = int(table.num_tokens[row] - table.num_prompt_tokens[row])
        if params.allowed_token_ids is not None:
            forbidden = torch.ones_like(values[i], dtype=torch.bool)
            forbidden[torch.tensor(list(params.allowed_token_ids), device=values.device)] = False
            values[i].masked_fill_(forbidden, -torch.inf)
        is_short = num_output_tokens < params.min_tokens
        if is_short and not (params.structured_outputs and _is_complete(values[i], stop_token_ids)):
            ends += [(i, token_id) for token_id in stop_token_ids]
        for token_id, amount in (params.logit_bias or {}).items():
            biases.append((i, token_id))
            amounts.append(min(max(amount, -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT))
    if ends:
        values[_at(ends, values)] = -torch.inf
    if biases:
        values[_at(biases, values)] += torch.tensor(amounts, dtype=torch.float32, device=values.device)


def _is_complete(logits: torch.Tensor, stop_token_ids: frozenset[int]) -> bool:
    """Whether a structured output is complete: its grammar allows only the tokens that end it."""
    others = logits.clone()
    others[list(stop_token_ids)] = -torch.inf
    return bool(others.max() == -torch.inf)


def _at(pairs: list[tuple[int, int]], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tensor(pairs, device=values.device).unbind(1)
