"""The real model with a pool for about three of 24 requests: whatever is swapped, copied or computed again, the
tokens are those of an unconstrained run, and the log-probabilities too."""

import pytest

from engines import TestEngine
from oracles import assert_same_draws, assert_same_tokens
from real_prompts import STORY
from treadle import SamplingParams

pytestmark = pytest.mark.slow

NUM_REQUESTS = 24
B = 16


def requests(tokenizer):
    """Greedy and seeded, one sequence and three, with log-probabilities; beams among them."""
    words = tokenizer.encode(STORY)
    found = []
    for i in range(NUM_REQUESTS):
        prompt = words[i * 9 : i * 9 + 24 + (i * 5) % 30]
        length = 12 + i % 9
        if i % 6 == 5:
            params = SamplingParams(n=3, use_beam_search=True, max_tokens=length, ignore_eos=True)
        elif i % 3 == 1:
            params = SamplingParams(n=3, seed=i, temperature=0.8, max_tokens=length, logprobs=2, ignore_eos=True)
        else:
            params = SamplingParams(temperature=0.0, max_tokens=length, logprobs=2, ignore_eos=True)
        found.append((prompt, params))
    return found


def run(loaded, model, wanted, **options):
    engine = TestEngine(loaded, model, max_num_batched_tokens=96, max_num_seqs=16, max_model_len=96, **options)
    plans = []

    class Keep:
        def on_schedule(self, plan):
            plans.append(plan)

        def on_update(self, plan, finished):
            pass

    engine.engine.add_observer(Keep())
    for i, (prompt, params) in enumerate(wanted):
        engine.add(str(i), prompt, params)
    results = engine.run()
    return [results[str(i)] for i in range(len(wanted))], plans


@pytest.fixture(scope="module")
def free(embedded_model, embedded_weights):
    wanted = requests(embedded_model.tokenizer)
    outputs, plans = run(embedded_model, embedded_weights, wanted, num_blocks=400)
    assert not any(plan.preempted for plan in plans)
    return wanted, outputs


@pytest.mark.parametrize("mode", ["auto", "recompute"])  # auto swaps what has several sequences
def test_same_answers_under_pressure(mode, free, oracle, embedded_model, embedded_weights):
    wanted, expected = free
    outputs, plans = run(
        embedded_model, embedded_weights, wanted,
        num_blocks=14, num_host_blocks=40, preemption_mode=mode, admission_headroom=0,
    )  # fmt: skip
    preempted = [p.mode.value for plan in plans for p in plan.preempted]
    assert len(preempted) >= 5
    assert ("swap" in preempted) == (mode != "recompute")
    assert any(plan.blocks_to_copy for plan in plans)
    for (prompt, params), output, reference in zip(wanted, outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, reference.outputs, strict=True):
            if ours.token_ids != theirs.token_ids:
                assert not params.use_beam_search
                if params.temperature:
                    assert_same_draws(oracle[0], prompt, ours.token_ids, theirs.token_ids, params, ours.index)
                else:
                    assert_same_tokens(oracle[0], prompt, ours.token_ids, theirs.token_ids)
                continue
            if ours.cumulative_logprob is not None:
                assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                shared = a.keys() & b.keys()
                assert shared
                assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in shared)
        if len(output.outputs) > 1:
            assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_beams_equal_transformers(oracle, embedded_model, embedded_weights):
    import torch

    prompts = [
        embedded_model.tokenizer.encode(text)
        for text in ("Once upon a time", "The capital of France is", STORY[:200])
    ]
    for prompt in prompts:
        for width, length_penalty, early_stopping in ((2, 1.0, False), (4, 0.5, True), (3, 2.0, "never")):
            params = SamplingParams(
                n=width, use_beam_search=True, max_tokens=12, length_penalty=length_penalty,
                early_stopping=early_stopping,
            )  # fmt: skip
            engine = TestEngine(embedded_model, embedded_weights, max_num_batched_tokens=64)
            engine.add("a", prompt, params)
            ours = [o.token_ids for o in engine.run()["a"].outputs]
            with torch.inference_mode():
                theirs = oracle[0].generate(
                    torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=12,
                    do_sample=False, length_penalty=length_penalty, early_stopping=early_stopping,
                    pad_token_id=0, eos_token_id=sorted(embedded_model.eos_token_ids),
                )  # fmt: skip
            expected = [strip(row.tolist()[len(prompt) :], embedded_model.eos_token_ids) for row in theirs]
            assert ours == expected


def strip(tokens, eos_ids):
    """Without the padding after the end."""
    for i, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: i + 1]
    return tokens
