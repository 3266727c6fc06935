"""Whatever the scheduler does, every request's tokens stay the same (float32; ties may fall either way)."""

import pytest

from engines import TestEngine
from oracles import assert_same_tokens
from real_prompts import prompts
from treadle import SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)

PAIRS = [("chunked", True), ("phased", False)]
"""A pair covers either; test_bitwise has more of them, on the native kernels."""


@pytest.fixture(scope="module")
def alone(embedded_model, embedded_weights):
    """Each prompt run by itself, whole."""
    ids = prompts(embedded_model.tokenizer)
    engine = TestEngine(embedded_model, embedded_weights, enable_prefix_caching=False, max_num_batched_tokens=2048)
    return ids, [engine.generate([prompt], GREEDY)[0] for prompt in ids]


def check(alone, oracle, outputs):
    for prompt, expected, output in zip(*alone, outputs, strict=True):
        assert_same_tokens(oracle[0], prompt, output, expected)


@pytest.mark.parametrize(("policy", "caching"), PAIRS)
def test_all_together(policy, caching, alone, oracle, embedded_model, embedded_weights):
    engine = TestEngine(
        embedded_model,
        embedded_weights,
        policy=policy,
        enable_prefix_caching=caching,
        max_num_batched_tokens=512,
    )
    check(alone, oracle, engine.generate(alone[0], GREEDY))


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks(chunk, alone, oracle, embedded_model, embedded_weights):
    engine = TestEngine(embedded_model, embedded_weights, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 6))
    check(alone, oracle, engine.generate(alone[0], GREEDY))


@pytest.mark.parametrize(("policy", "caching"), PAIRS)
def test_a_pool_for_little_more_than_one(policy, caching, alone, oracle, embedded_model, embedded_weights):
    # The longest prompt (600 + 16 tokens) has the pool to itself; the short ones are preempted many times.
    short = [(p, out) for p, out in zip(*alone, strict=True) if len(p) <= 100]
    for prompts_and_outputs, num_blocks, least in ((list(zip(*alone, strict=True)), 155, 1), (short, 28, 5)):
        check_preempted(
            policy, caching, prompts_and_outputs, num_blocks, least, oracle, embedded_model, embedded_weights
        )


def check_preempted(policy, caching, expected, num_blocks, least, oracle, embedded_model, embedded_weights):
    engine = TestEngine(
        embedded_model,
        embedded_weights,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=num_blocks * 4,
        policy=policy,
        enable_prefix_caching=caching,
        admission_headroom=0,
        max_num_batched_tokens=256,
    )
    preemptions = []

    class Count:
        def on_schedule(self, plan):
            preemptions.extend(plan.preempted)

        def on_update(self, plan, finished):
            pass

    engine.engine.add_observer(Count())
    prompts_, outputs = zip(*expected, strict=True)
    check((prompts_, outputs), oracle, engine.generate(prompts_, GREEDY))
    assert len(preemptions) >= least


def test_a_second_run_is_served_from_the_cache(alone, oracle, embedded_model, embedded_weights):
    engine = TestEngine(embedded_model, embedded_weights, num_blocks=600)
    engine.generate(alone[0], GREEDY)
    for i, prompt in enumerate(alone[0]):
        engine.add(f"again {i}", prompt, GREEDY)
    results = engine.run()
    outputs = [results[f"again {i}"] for i in range(len(alone[0]))]
    check(alone, oracle, [output.outputs[0].token_ids for output in outputs])
    for prompt, output in zip(alone[0], outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_aborted_neighbours(alone, oracle, embedded_model, embedded_weights):
    engine = TestEngine(embedded_model, embedded_weights, max_num_batched_tokens=64)
    for i in range(12):
        engine.add(f"neighbour {i}", alone[0][(i * 7) % 20], SamplingParams(temperature=1.0, max_tokens=200))

    def abort(step):
        if step % 3 == 0:
            engine.engine.abort_request(f"neighbour {step // 3 - 1}")

    check(alone, oracle, engine.generate(alone[0], GREEDY, on_step=abort))


def test_seeded_sampling_does_not_depend_on_the_schedule(embedded_model, embedded_weights):
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=3, max_tokens=24)
    ids = prompts(embedded_model.tokenizer)[:10:2]
    whole = TestEngine(embedded_model, embedded_weights, max_num_batched_tokens=2048)
    alone = [whole.generate([prompt], params)[0] for prompt in ids]
    tight = TestEngine(
        embedded_model,
        embedded_weights,
        num_blocks=80,
        block_size=4,
        max_num_batched_tokens=20,
        max_num_seqs=8,
    )
    assert tight.generate(ids, params) == alone
