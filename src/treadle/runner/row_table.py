"""What a runner knows of the rows, learned from nothing but the sequence of plans.

A plan tells what is new; the runner adds the tokens that it samples itself. So a runner in another process, or one
that is fed recorded plans, has the same tables.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.sampling_params import SamplingParams
from treadle.scheduler.plan import NewRow, StepPlan

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


class SamplingRows:
    """Sampling parameters as arrays over rows; what does not fit an array stays in SamplingParams.

    Attributes:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: float32 [rows].
        top_k: int32 [rows], 0 for all tokens.
        seed: uint64 [rows], of the request.
        sequence_index: int32 [rows], number of the sequence in its request.
        is_greedy: whether the row takes the most likely token.
        is_biased: whether biases, allowed ids, min_tokens or a grammar change the row's logits.
        has_grammar: whether a grammar does.
        is_penalized: whether penalties change the row's logits.
        filters: whether top_k, top_p or min_p drop tokens.
        num_logprobs: int32 [rows], most likely tokens that are reported beside the sampled one; -1 for no report.
        needs_logits: whether the row needs more than its most likely token.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.top_p: FloatArray = np.ones(num_rows, dtype=np.float32)
        self.min_p: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.repetition_penalty: FloatArray = np.ones(num_rows, dtype=np.float32)
        self.presence_penalty: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.top_k: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        self.sequence_index: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.is_greedy: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.is_biased: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.has_grammar: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.is_penalized: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.filters: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.num_logprobs: IntArray = np.full(num_rows, -1, dtype=np.int32)
        self.needs_logits: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def set(self, row: int, params: SamplingParams, seed: int, sequence_index: int) -> None:
        """Fill `row` from a request's parameters."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.top_k[row] = max(params.top_k, 0)
        self.seed[row] = seed
        self.sequence_index[row] = sequence_index
        self.is_greedy[row] = params.is_greedy
        self.has_grammar[row] = params.structured_outputs is not None
        self.is_biased[row] = bool(
            params.min_tokens or params.logit_bias or params.allowed_token_ids or params.structured_outputs
        )
        self.is_penalized[row] = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.filters[row] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.needs_logits[row] = (
            not params.is_greedy or self.is_biased[row] or self.is_penalized[row] or params.logprobs is not None
        )


class RowTable:
    """The rows' tokens, sampling parameters and block tables.

    Args:
        max_num_seqs: number of rows.
        max_model_len: most tokens of one sequence.
        block_size: slots of a block.

    Attributes:
        token_ids: int32 [rows, max_model_len], valid up to num_tokens.
        num_tokens: int32 [rows], tokens known.
        num_prompt_tokens: int32 [rows], of them in the prompt.
        adapter_ids: int32 [rows], LoRA adapter, 0 for the base model.
        block_tables: int32 [rows, max_blocks], block ids.
        sampling: sampling parameters as arrays.
        params: by row, what does not fit an array; None where no sequence is.
        stop_token_ids: by row, ids that end the sequence.
        grammars: by row, text of the sequence's grammar, None without one.
        matchers: by row, how far its output has got in its grammar; made by whoever needs it.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.adapter_ids: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables: IntArray = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs)
        self.params: list[SamplingParams | None] = [None] * max_num_seqs
        self.stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs
        self.grammars: list[str | None] = [None] * max_num_seqs
        self.matchers: list[Any] = [None] * max_num_seqs

    def take(self, plan: StepPlan) -> None:
        """Take in what a plan tells of rows and blocks."""
        for row in plan.freed_rows:
            self.params[row] = self.grammars[row] = self.matchers[row] = None
        for new in plan.new_rows:
            self._set(new)
        changes = plan.new_blocks
        if len(changes.rows):
            # Where a place occurs several times, numpy keeps the last value.
            self.block_tables[changes.rows, changes.places] = changes.blocks

    def _set(self, new: NewRow) -> None:
        row, count = new.row, len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.adapter_ids[row] = new.adapter_id
        self.sampling.set(row, new.sampling_params, new.seed, new.sequence_index)
        self.params[row] = new.sampling_params
        self.stop_token_ids[row] = new.stop_token_ids
        if new.grammar != self.grammars[row]:
            # A matcher follows the tokens: one of the same grammar finds its way to other tokens (beam search).
            self.grammars[row], self.matchers[row] = new.grammar, None

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Note a token that was sampled for each of the distinct `rows`, int32 [n] both."""
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1
