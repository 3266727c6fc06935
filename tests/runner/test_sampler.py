"""Sampling, compared with brute force over the vocabulary, one row at a time."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from support.examples import examples
from support.native import native_library
from treadle.backends.cpu.sampling import NativeSampling
from treadle.backends.torch.sampling import TorchSampling, filter_logits
from treadle.core.sampling_params import SamplingParams
from treadle.runner.noise import uniform
from treadle.runner.row_table import RowTable
from treadle.runner.sampler import Sampler, StepLogits
from treadle.scheduler import NewRow, StepPlan

V = 40


def rows_for(params_list, prompts=None, outputs=None, stop_ids=frozenset(), seeds=None):
    table = RowTable(len(params_list) + 3, 64, block_size=16)
    rows = np.arange(len(params_list), dtype=np.int32)[::-1].copy()
    new = tuple(
        NewRow(
            row=row,
            token_ids=np.array([*(prompts[i] if prompts else [1, 2]), *(outputs or {}).get(i, ())], dtype=np.int32),
            num_prompt_tokens=len(prompts[i]) if prompts else 2,
            sampling_params=params_list[i],
            seed=seeds[i] if seeds else i,
            sequence_index=0,
            stop_token_ids=stop_ids,
            grammar=None,
            adapter_id=0,
        )
        for i, row in enumerate(rows.tolist())
    )
    table.take(StepPlan(1, rows, rows, rows, rows, new_rows=new))
    return table, rows


def find_grammar(text):
    raise AssertionError("no row has a grammar")


def logits_like(seed, n=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (n, V)).astype(np.float32))


def sample_rows(sampler, logits, table, rows):
    every = np.arange(len(rows), dtype=np.int32)
    best = logits.argmax(dim=-1).numpy().astype(np.int32)
    return sampler.sample(StepLogits(logits.clone(), every, best), table, rows, table.sampling.sequence_index[rows])


@pytest.fixture(params=["torch", "native"])
def sampler(request):
    kernels = TorchSampling() if request.param == "torch" else NativeSampling(native_library(), threads=2)
    return Sampler(kernels, find_grammar, threads=2)


@pytest.fixture
def sample(sampler):
    def sample(logits, params, **kwargs):
        table, rows = rows_for([params], **kwargs)
        tokens, logprobs, _ = sample_rows(sampler, logits, table, rows)
        return int(tokens[0]), logprobs.get(0)

    return sample


def kept_by_brute_force(logits, params):
    """Return the token ids that the filters keep, computed by sorting and summing in plain Python."""
    scaled = [x / params.temperature for x in logits.tolist()]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = sorted(range(V), key=lambda i: -weights[i])
    if params.top_k > 0:
        least = weights[order[min(params.top_k, V) - 1]]
        order = [i for i in order if weights[i] >= least]
    by_min_p = {i for i in order if weights[i] >= params.min_p * weights[order[0]] * (1 - 1e-6)}
    total = sum(weights[i] for i in order)
    kept, mass = set(), 0.0
    for i in order:
        if params.top_p == 1.0 or mass < params.top_p * total * (1 - 1e-9):
            kept.add(i)
        mass += weights[i]
    return kept & by_min_p


@examples(200)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, -1, 1, 3, 39, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_filters_keep_what_brute_force_keeps(seed, top_k, top_p, min_p, temperature):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = logits_like(seed)
    filtered = filter_logits(
        logits / temperature,
        np.array([max(top_k, 0)], dtype=np.int32),
        np.array([top_p], dtype=np.float32),
        np.array([min_p], dtype=np.float32),
    )
    kept = set(torch.nonzero(filtered[0] > -torch.inf).flatten().tolist())
    assert kept == kept_by_brute_force(logits[0], params)


def test_filters_that_keep_more_tokens_than_the_candidates():
    # A flat distribution over more tokens than the sampler's candidates.
    logits = torch.linspace(0, 0.1, 5000)[None, :]
    many = filter_logits(logits, np.array([3000]), np.array([1.0]), np.array([0.0]))
    assert int((many > -torch.inf).sum()) == 3000
    half = filter_logits(logits, np.array([0]), np.array([0.5]), np.array([0.0]))
    expected = int(torch.searchsorted(logits[0].flip(0).double().softmax(-1).cumsum(-1), 0.5)) + 1
    assert int((half > -torch.inf).sum()) == expected


def test_sampled_frequencies_follow_the_distribution(sampler):
    logits = logits_like(3)[:, :8]
    logits = torch.cat([logits, torch.full((1, V - 8), -torch.inf)], dim=1)
    n = 4000
    params = SamplingParams(temperature=1.3)
    table, rows = rows_for([params] * n, seeds=list(range(n)))
    tokens, _, _ = sample_rows(sampler, logits.repeat(n, 1), table, rows)
    counts = np.bincount(tokens, minlength=V)
    expected = (logits[0] / 1.3).softmax(-1).numpy() * n
    assert counts[8:].sum() == 0
    chi2 = ((counts[:8] - expected[:8]) ** 2 / expected[:8]).sum()
    assert chi2 < 24.3  # 7 degrees of freedom, one in a thousand


def test_noise_is_uniform_and_differs_by_seed_sequence_and_position():
    n = 20_000
    for vary in range(3):
        args = [np.full(n, 5, dtype=np.uint64), np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int64)]
        args[vary] = np.arange(n).astype(args[vary].dtype)
        noise = uniform(*args)
        assert 0.0 <= noise.min() <= noise.max() < 1.0
        assert len(np.unique(noise)) == n
        counts = np.histogram(noise, bins=50, range=(0, 1))[0]
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 85.4  # 49 degrees of freedom, one in a thousand
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03


def test_a_row_does_not_depend_on_the_other_rows(sampler, sample):
    params = SamplingParams(temperature=0.9, top_p=0.8, seed=11)
    alone, _ = sample(logits_like(1), params, seeds=[11])
    others = [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0, top_k=5), params]
    table, rows = rows_for(others, seeds=[1, 2, 11])
    tokens, _, _ = sample_rows(sampler, torch.cat([logits_like(8, 2), logits_like(1)]), table, rows)
    assert tokens[2] == alone
    assert tokens[0] == int(logits_like(8, 2)[0].argmax())


def test_greedy_sampling_selects_the_most_likely_token(sample):
    for seed in range(5):
        assert sample(logits_like(seed), SamplingParams(temperature=0.0))[0] == int(logits_like(seed).argmax())


def test_penalties(sample):
    logits = torch.zeros(1, V)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.9, 2.0
    greedy = {"temperature": 0.0}
    seen = {"prompts": [[5, 9]], "outputs": {0: [6, 6]}}
    assert sample(logits, SamplingParams(**greedy), **seen)[0] == 5
    # 5 is in the prompt, 6 in the output: 3.0 / 1.6 and 2.9 / 1.6 are below 2.0.
    assert sample(logits, SamplingParams(repetition_penalty=1.6, **greedy), **seen)[0] == 7
    # Presence and frequency penalties count the output only.
    logits[0, 6] = 3.2
    assert sample(logits, SamplingParams(presence_penalty=0.1, **greedy), **seen)[0] == 6
    assert sample(logits, SamplingParams(presence_penalty=0.3, **greedy), **seen)[0] == 5
    assert sample(logits, SamplingParams(frequency_penalty=0.05, **greedy), **seen)[0] == 6
    assert sample(logits, SamplingParams(frequency_penalty=0.15, **greedy), **seen)[0] == 5
    # A negative logit is multiplied.
    negative = torch.full((1, V), -10.0)
    negative[0, 9], negative[0, 11] = -1.0, -1.5
    assert sample(negative, SamplingParams(repetition_penalty=2.0, **greedy), **seen)[0] == 11


def test_bias_and_allowed_ids(sample):
    logits = logits_like(4)
    best = int(logits.argmax())
    assert sample(logits, SamplingParams(temperature=0.0, logit_bias={3: 50.0}))[0] == 3
    assert sample(logits, SamplingParams(temperature=0.0, logit_bias={best: -50.0}))[0] != best
    allowed = [2, 17, 30]
    token, _ = sample(logits, SamplingParams(temperature=0.0, allowed_token_ids=allowed))
    assert token == max(allowed, key=lambda i: float(logits[0, i]))
    for seed in range(20):
        token, _ = sample(logits, SamplingParams(temperature=3.0, allowed_token_ids=allowed), seeds=[seed])
        assert token in allowed


def test_end_tokens_are_masked_before_min_tokens(sample):
    logits = torch.zeros(1, V)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9)
    ends = {"stop_ids": frozenset({7})}
    assert sample(logits, params, outputs={0: [1]}, **ends)[0] == 8
    assert sample(logits, params, outputs={0: [1, 1]}, **ends)[0] == 7


def test_logprobs_are_computed_from_the_unmodified_logits(sample):
    logits = logits_like(9)
    expected = logits[0].log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={order[5]: 100.0})
    token, logprobs = sample(logits, params)
    assert token == logprobs.token_id == order[5]
    assert logprobs.rank == 6
    assert logprobs.logprob == pytest.approx(float(expected[token]), abs=1e-6)
    assert list(logprobs.top_token_ids) == order[:3]
    assert logprobs.top_logprobs == pytest.approx(expected[order[:3]].tolist(), abs=1e-6)


def test_logprobs_zero_still_reports_the_sampled_token(sample):
    _, logprobs = sample(logits_like(9), SamplingParams(temperature=0.0, logprobs=0))
    assert logprobs.rank == 1
    assert logprobs.top_token_ids == ()


@examples(150)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([1, 5, 16, 17, 255, 256, 257, 3000]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05]),
    temperature=st.sampled_from([0.3, 1.0]),
)
def test_native_draws_equal_those_of_torch(seed, vocab, spread, top_k, top_p, min_p, temperature):
    """Equal noise gives equal tokens, unless the noise lies on the boundary between two tokens."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (1, vocab)).astype(np.float32))
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    table, rows = rows_for([params])
    place = np.zeros(1, dtype=np.int32)
    kept = filter_logits(logits / temperature, *(getattr(table.sampling, name)[rows] for name in FILTERS))
    cumulative = kept[0].double().softmax(-1).cumsum(-1)
    for noise in np.random.default_rng(seed + 1).random(8):
        (token,) = NativeSampling(native_library(), threads=1).draw(logits, place, table, rows, np.array([noise]))
        low, high = float(cumulative[token - 1]) if token else 0.0, float(cumulative[token])
        # Floating-point rounding of a threshold may keep or drop one more token.
        slack = 1e-5 + (float(kept[0].double().softmax(-1)[kept[0] > -torch.inf].min()) if len(kept[0]) > 1 else 0)
        assert low - slack <= noise <= high + slack


FILTERS = ("top_k", "top_p", "min_p")


@examples(60)
@given(seed=st.integers(0, 10_000), vocab=st.sampled_from([1, 16, 31, 300]), num_top=st.integers(0, 20))
def test_native_logprobs_equal_those_of_torch(seed, vocab, num_top):
    rng = np.random.default_rng(seed)
    # With few distinct values there are ties, which are broken in favour of the lower id.
    values = torch.from_numpy(rng.integers(-20, 20, (3, vocab)).astype(np.float32) / 4)
    token_ids = rng.integers(0, vocab, 4).astype(np.int32)
    place = np.array([2, 0, 1, 0], dtype=np.int32)
    tops = np.minimum(np.array([num_top, 0, 3, num_top], dtype=np.int32), vocab).astype(np.int32)
    ours = NativeSampling(native_library(), threads=2).report(values, place, token_ids, tops)
    theirs = TorchSampling().report(values, place, token_ids, tops)
    for a, b, row in zip(ours, theirs, place, strict=True):
        assert (a.token_id, a.rank) == (b.token_id, b.rank)
        assert a.logprob == pytest.approx(b.logprob, abs=2e-6)
        assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=2e-6)
        order = sorted(range(vocab), key=lambda i, row=row: (-float(values[row, i]), i))
        assert list(a.top_token_ids) == order[: len(a.top_token_ids)]


def test_the_native_sampler_never_draws_a_forbidden_token():
    logits = torch.full((1, 500), -torch.inf)
    logits[0, 400] = -3.0
    table, rows = rows_for([SamplingParams(temperature=5.0)])
    for noise in (0.0, 0.5, 1 - 2**-53):
        (token,) = NativeSampling(native_library(), threads=1).draw(
            logits, np.zeros(1, dtype=np.int32), table, rows, np.array([noise])
        )
        assert token == 400
