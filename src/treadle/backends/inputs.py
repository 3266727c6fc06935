"""The inputs of a backend: the flat arrays of a step, and arrays over rows for sampling."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from treadle.core.request import IntArray
from treadle.core.sampling_params import SamplingParams

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """T tokens in R runs; a run is one entry of the plan, tokens of one row at consecutive positions.

    Attributes:
        token_ids, positions, rows: int32 [T].
        run_rows, run_starts, run_counts: int32 [R], of each run: its row, the index of its first token among the T,
            and its number of tokens.
        num_prefills: number of runs that are prompts or parts of prompts; they come first.
        block_tables: int32 [rows, max_blocks].
    """

    token_ids: IntArray
    positions: IntArray
    rows: IntArray
    run_rows: IntArray
    run_starts: IntArray
    run_counts: IntArray
    num_prefills: int
    block_tables: IntArray

    @property
    def run_ends(self) -> IntArray:
        """Index of each run's last token: int32 [R]."""
        return self.run_starts + self.run_counts - np.int32(1)


class SamplingRows:
    """Sampling parameters as arrays over rows; those that do not fit an array stay in SamplingParams.

    Attributes:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: float32 [rows].
        top_k: int32 [rows], 0 for all tokens.
        seed: uint64 [rows], of the request.
        sequence_index: int32 [rows], index of the sequence in its request.
        is_greedy: whether the row takes the most likely token.
        is_biased: whether biases, allowed ids, min_tokens or a grammar change the row's logits.
        has_grammar: whether the row has a grammar.
        is_penalized: whether penalties change the row's logits.
        filters: whether top_k, top_p or min_p drop tokens.
        num_logprobs: int32 [rows], most likely tokens to report besides the sampled one; -1 for no report.
        needs_logits: whether sampling needs more than the row's most likely token.
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


class Rows(Protocol):
    """The arrays over rows that sampling reads.

    Attributes:
        token_ids: int32 [rows, max_model_len], valid up to num_tokens.
        num_tokens: int32 [rows], known tokens.
        num_prompt_tokens: int32 [rows], how many of them belong to the prompt.
        sampling: sampling parameters.
    """

    token_ids: IntArray
    num_tokens: IntArray
    num_prompt_tokens: IntArray
    sampling: SamplingRows
