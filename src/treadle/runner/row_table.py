"""What a runner knows about the rows, all of it taken from the sequence of plans.

A plan says what is new, and the runner adds the tokens that it samples. A runner in another process, or one that is
fed recorded plans, therefore has the same tables.
"""

from typing import Any

import numpy as np

from treadle.backends.inputs import SamplingRows
from treadle.core.request import IntArray
from treadle.core.sampling_params import SamplingParams
from treadle.scheduler.plan import NewRow, StepPlan


class RowTable:
    """The rows' tokens, sampling parameters and block tables.

    Args:
        max_num_seqs: number of rows.
        max_model_len: maximum number of tokens of one sequence.
        block_size: slots of a block.

    Attributes:
        token_ids: int32 [rows, max_model_len], valid up to num_tokens.
        num_tokens: int32 [rows], known tokens.
        num_prompt_tokens: int32 [rows], how many of them belong to the prompt.
        adapter_ids: int32 [rows], LoRA adapter, 0 for the base model.
        block_tables: int32 [rows, max_blocks], block ids.
        sampling: sampling parameters as arrays.
        params: by row, the complete sampling parameters; None in an empty row.
        stop_token_ids: by row, ids that end the sequence.
        grammars: by row, text of the sequence's grammar; None if it has none.
        matchers: by row, the state of its output in its grammar; GrammarMasks creates it when it is first needed.
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
        """Apply what a plan says about rows and blocks."""
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
            # A matcher of the same grammar can stay: it rolls back to what the outputs have in common (beam search).
            self.grammars[row], self.matchers[row] = new.grammar, None

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one sampled token to each of the distinct `rows`; both are int32 [n]."""
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1
