"""A request's tokens are the same under every schedule (float32 in torch; ties may be broken either way).

test_bitwise.py tests more schedules, on the native kernels and for bit-identical results.
"""

import pytest

from support.engines import TestEngine
from support.oracles import assert_same_tokens
from support.tiny import make_prompts
from treadle import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LENGTHS = [1, 2, 3, 5, 8, 13, 16, 17, 24, 31, 40, 48, 63, 64, 65, 90, 100, 150, 300, 600]

PAIRS = [("chunked", True), ("phased", False)]
"""(Policy, prefix caching): combinations that cover both values of each."""


@pytest.fixture(scope="module")
def alone(tiny):
    """The output of each prompt when it runs alone, without chunks."""
    prompts = make_prompts(LENGTHS)
    engine = TestEngine(tiny.loaded, tiny.weights, enable_prefix_caching=False, max_num_batched_tokens=2048)
    return prompts, [engine.generate([prompt], GREEDY)[0] for prompt in prompts]


def check(alone, tiny, outputs):
    for prompt, expected, output in zip(*alone, outputs, strict=True):
        assert_same_tokens(tiny.oracle, prompt, output, expected)


@pytest.mark.parametrize(("policy", "caching"), PAIRS)
def test_a_batch_of_all_requests(policy, caching, alone, tiny):
    engine = TestEngine(
        tiny.loaded, tiny.weights, scheduler=policy, enable_prefix_caching=caching, max_num_batched_tokens=512
    )
    check(alone, tiny, engine.generate(alone[0], GREEDY))


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_prompts(chunk, alone, tiny):
    engine = TestEngine(tiny.loaded, tiny.weights, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 6))
    check(alone, tiny, engine.generate(alone[0], GREEDY))


@pytest.mark.parametrize(("policy", "caching"), PAIRS)
def test_a_pool_that_forces_preemptions(policy, caching, alone, tiny):
    # The longest prompt (600 + 16 tokens) fills the pool by itself; the short ones are preempted many times.
    short = [(p, out) for p, out in zip(*alone, strict=True) if len(p) <= 90]
    for expected, num_blocks, least in ((list(zip(*alone, strict=True)), 155, 1), (short, 28, 5)):
        engine = TestEngine(
            tiny.loaded, tiny.weights, num_blocks=num_blocks, block_size=4, max_model_len=num_blocks * 4,
            scheduler=policy, enable_prefix_caching=caching, admission_headroom=0, max_num_batched_tokens=256,
        )  # fmt: skip
        prompts, outputs = zip(*expected, strict=True)
        check((prompts, outputs), tiny, engine.generate(prompts, GREEDY))
        assert len(engine.preemptions) >= least


def test_a_second_run_is_served_from_the_cache(alone, tiny):
    engine = TestEngine(tiny.loaded, tiny.weights, num_blocks=600)
    engine.generate(alone[0], GREEDY)
    for i, prompt in enumerate(alone[0]):
        engine.add(f"again {i}", prompt, GREEDY)
    results = engine.run()
    outputs = [results[f"again {i}"] for i in range(len(alone[0]))]
    check(alone, tiny, [output.outputs[0].token_ids for output in outputs])
    for prompt, output in zip(alone[0], outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


def test_aborted_neighbours(alone, tiny):
    engine = TestEngine(tiny.loaded, tiny.weights, max_num_batched_tokens=64)
    for i in range(12):
        engine.add(f"neighbour {i}", alone[0][(i * 7) % 20], SamplingParams(temperature=1.0, max_tokens=200))

    def abort(step):
        if step % 3 == 0:
            engine.engine.abort_request(f"neighbour {step // 3 - 1}")

    check(alone, tiny, engine.generate(alone[0], GREEDY, on_step=abort))


def test_seeded_sampling_does_not_depend_on_the_schedule(tiny):
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=3, max_tokens=24, ignore_eos=True)
    prompts = make_prompts(LENGTHS)[:10:2]
    whole = TestEngine(tiny.loaded, tiny.weights, max_num_batched_tokens=2048)
    alone = [whole.generate([prompt], params)[0] for prompt in prompts]
    tight = TestEngine(
        tiny.loaded, tiny.weights, num_blocks=80, block_size=4, max_num_batched_tokens=20, max_num_seqs=8
    )
    assert tight.generate(prompts, params) == alone
