"""Outputs equal those of transformers on the same file."""

import pytest

from support.engines import TestEngine, logits_of
from support.oracles import assert_greedy, reference_logits
from support.real_prompts import TEXTS, prompts
from treadle import SamplingParams

pytestmark = pytest.mark.slow

MAX_TOKENS = 16


@pytest.fixture(scope="module")
def answers(embedded_model, embedded_weights):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    ids = prompts(embedded_model.tokenizer)
    engine = TestEngine(embedded_model, embedded_weights, num_blocks=600, max_num_batched_tokens=256)
    return list(zip(ids, engine.generate(ids, params), strict=True))


def test_prompts_span_1_to_600_tokens(embedded_model):
    lengths = sorted(map(len, prompts(embedded_model.tokenizer)))
    assert len(lengths) == 20
    assert lengths[0] == 1
    assert lengths[-1] == 600


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_greedy_tokens_equal_transformers(number, answers, oracle, embedded_model):
    prompt, output = answers[number]
    assert_greedy(oracle, prompt, output, eos_ids=embedded_model.eos_token_ids, max_tokens=MAX_TOKENS)


def test_logits_are_within_1e_3(oracle, embedded_model, embedded_weights):
    for prompt in prompts(embedded_model.tokenizer)[10:18]:
        ours = logits_of(embedded_model, embedded_weights, prompt)
        theirs = reference_logits(oracle, prompt)
        assert (ours - theirs).abs().max() < 1e-3
