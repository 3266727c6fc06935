"""A pool for about three of 24 requests: despite swaps, copies and recomputes, the tokens are those of an
unconstrained run, and the log-probabilities too."""

import pytest
import torch

from support.engines import TestEngine
from support.oracles import assert_same_draws, assert_same_tokens
from support.tiny import make_prompts
from treadle import SamplingParams

NUM_REQUESTS = 24
SEARCHES = ((2, 1.0, False), (4, 0.5, True), (3, 2.0, "never"))
"""(Width, length_penalty, early_stopping) of each beam search."""


def requests():
    """Return greedy and seeded requests with one sequence or three and with log-probabilities, and beam searches."""
    found = []
    for i, prompt in enumerate(make_prompts([24 + (i * 5) % 30 for i in range(NUM_REQUESTS)])):
        length = 12 + i % 9
        if i % 6 == 5:
            params = SamplingParams(n=3, use_beam_search=True, max_tokens=length, ignore_eos=True)
        elif i % 3 == 1:
            params = SamplingParams(n=3, seed=i, temperature=0.8, max_tokens=length, logprobs=2, ignore_eos=True)
        else:
            params = SamplingParams(temperature=0.0, max_tokens=length, logprobs=2, ignore_eos=True)
        found.append((prompt, params))
    return found


def run(tiny, wanted, **options):
    engine = TestEngine(
        tiny.loaded, tiny.weights, max_num_batched_tokens=96, max_num_seqs=16, max_model_len=96, **options
    )
    for i, (prompt, params) in enumerate(wanted):
        engine.add(str(i), prompt, params)
    results = engine.run()
    return [results[str(i)] for i in range(len(wanted))], engine


@pytest.fixture(scope="module")
def free(tiny):
    wanted = requests()
    outputs, engine = run(tiny, wanted, num_blocks=400)
    assert not engine.preemptions
    return wanted, outputs


@pytest.mark.parametrize("mode", ["auto", "recompute"])  # auto swaps requests with several sequences
def test_outputs_in_a_small_pool_equal_an_unconstrained_run(mode, free, tiny):
    wanted, expected = free
    outputs, engine = run(tiny, wanted, num_blocks=14, num_host_blocks=40, preemption_mode=mode, admission_headroom=0)
    preempted = [p.mode.value for p in engine.preemptions]
    assert len(preempted) >= 5
    assert ("swap" in preempted) == (mode != "recompute")
    assert any(plan.moves.copy for plan in engine.plans)
    for (prompt, params), output, reference in zip(wanted, outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, reference.outputs, strict=True):
            if ours.token_ids != theirs.token_ids:
                assert not params.use_beam_search
                if params.temperature:
                    assert_same_draws(tiny.oracle, prompt, ours.token_ids, theirs.token_ids, params, ours.index)
                else:
                    assert_same_tokens(tiny.oracle, prompt, ours.token_ids, theirs.token_ids)
                continue
            if ours.cumulative_logprob is not None:
                assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                shared = a.keys() & b.keys()
                assert shared
                assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in shared)
        if len(output.outputs) > 1:
            assert len({tuple(o.token_ids) for o in output.outputs}) == 3


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_beams_equal_transformers(is_real, tiny, request):
    if is_real:
        loaded, weights = request.getfixturevalue("embedded_model"), request.getfixturevalue("embedded_weights")
        oracle = request.getfixturevalue("oracle")
        prompts, searches = [loaded.tokenizer.encode("The capital of France is")], SEARCHES[:1]
    else:
        (loaded, weights, oracle, _), prompts, searches = tiny, make_prompts([4, 9, 40]), SEARCHES
    for prompt in prompts:
        for width, length_penalty, early_stopping in searches:
            params = SamplingParams(
                n=width, use_beam_search=True, max_tokens=12, length_penalty=length_penalty,
                early_stopping=early_stopping,
            )  # fmt: skip
            engine = TestEngine(loaded, weights, max_num_batched_tokens=64)
            engine.add("a", prompt, params)
            ours = [o.token_ids for o in engine.run()["a"].outputs]
            with torch.inference_mode():
                theirs = oracle.generate(
                    torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=12,
                    do_sample=False, length_penalty=length_penalty, early_stopping=early_stopping,
                    pad_token_id=0, eos_token_id=sorted(loaded.eos_token_ids),
                )  # fmt: skip
            expected = [strip(row.tolist()[len(prompt) :], loaded.eos_token_ids) for row in theirs]
            assert ours == expected


def strip(tokens, eos_ids):
    """Return the tokens up to the end token, without the padding."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
