"""The masks of allowed tokens for rows with a grammar."""

import numpy as np
import pytest
import torch

from treadle.core.sampling_params import SamplingParams
from treadle.runner.grammar_masks import GrammarMasks
from treadle.runner.row_table import RowTable
from treadle.scheduler import NewRow, StepPlan
from treadle.text.grammar import GrammarCompiler

NO_ROWS = np.empty(0, dtype=np.int32)


@pytest.fixture(scope="module")
def compiler(embedded_model):
    model = embedded_model
    return GrammarCompiler(model.tokenizer, model.config.vocab_size, model.eos_token_ids)


def test_a_new_sequence_in_a_row_does_not_inherit_an_error(compiler, embedded_model):
    """The row is reused at once, with the same grammar and an output that obeys it."""
    params = SamplingParams(structured_outputs={"regex": "a*b"})
    grammar = compiler.compile(params.structured_outputs)
    table, masks = RowTable(1, 32, block_size=16), GrammarMasks(compiler.find, threads=1)
    encode = embedded_model.tokenizer.encode
    allowed = []
    for output in ("xyz", "a"):
        tokens = np.array([1, *encode(output)], dtype=np.int32)
        new = NewRow(0, tokens, 1, params, 0, 0, frozenset(), grammar.text, 0)
        table.take(StepPlan(1, NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, new_rows=(new,)))
        logits = torch.zeros(1, embedded_model.config.vocab_size)
        errors = masks.apply(logits, np.zeros(1, dtype=np.int32), table, np.zeros(1, dtype=np.int32))
        allowed.append((bool(errors), logits[0, encode("b")[0]].item()))
    assert allowed[0][0]
    assert allowed[1] == (False, 0.0)
