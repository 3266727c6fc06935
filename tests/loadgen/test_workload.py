"""Workloads of the load generator."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from treadle.core.errors import UsageError
from treadle.loadgen.workload import Job, at_rate, random_jobs, trace_jobs

DATA = Path(__file__).parents[3] / "shared" / "data"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,10,20
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1500, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 7]},
    {"timestamp": 4000, "input_length": 700, "output_length": 9, "hash_ids": [8, 9]},
]
OPTIONS = {"length_scale": 1.0, "max_len": 100_000, "vocab_size": 5000, "seed": 3}


def test_random_prompts_are_reproducible_and_share_no_prefix():
    jobs = random_jobs(20, 30, 7, vocab_size=500, seed=1)
    assert jobs == random_jobs(20, 30, 7, vocab_size=500, seed=1)
    assert jobs != random_jobs(20, 30, 7, vocab_size=500, seed=2)
    assert {len(job.prompt) for job in jobs} == {30}
    assert {job.max_tokens for job in jobs} == {7}
    assert all(100 <= token < 500 for job in jobs for token in job.prompt)
    assert len({job.prompt[:4] for job in jobs}) == 20


def test_azure_traces_are_parsed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    jobs = trace_jobs(path, 100, **OPTIONS)
    assert [len(job.prompt) for job in jobs] == [4808, 3180, 10]
    assert [job.max_tokens for job in jobs] == [10, 8, 20]
    assert [job.at for job in jobs] == pytest.approx([0.0, 0.052, 2.0])
    small = trace_jobs(path, 2, **{**OPTIONS, "length_scale": 0.01, "max_len": 40})
    assert [(len(job.prompt), job.max_tokens) for job in small] == [(39, 1), (32, 1)]


def test_mooncake_prompts_with_equal_hashes_share_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    for scale, block in ((1.0, 512), (0.125, 64)):
        first, second, third = trace_jobs(path, 100, **{**OPTIONS, "length_scale": scale})
        assert len(first.prompt) == round(1500 * scale)
        assert first.prompt[: 2 * block] == second.prompt[: 2 * block]
        assert first.prompt[2 * block :] != second.prompt[2 * block :]
        assert first.prompt[:block] != third.prompt[:block]
        assert [job.at for job in (first, second, third)] == [0.0, 0.5, 3.0]


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"])
@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "none.csv"])
def test_files_that_are_not_traces_are_refused(tmp_path, content, name):
    (tmp_path / name).write_text(content) if name != "none.csv" else None
    with pytest.raises(UsageError, match=name):
        trace_jobs(tmp_path / name, 10, **OPTIONS)


def test_arrivals_at_a_rate_are_a_poisson_process():
    jobs = at_rate([Job((1,), 1)] * 4000, 20.0, seed=1)
    gaps = [b.at - a.at for a, b in pairwise(jobs)]
    assert jobs[0].at == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(
        1 / 20, rel=0.1
    )  # the standard deviation of an exponential distribution is its mean


def test_a_scaled_trace_keeps_its_arrival_pattern():
    jobs = [Job((1,), 1, at) for at in (0.0, 1.0, 1.5, 8.0)]
    assert [job.at for job in at_rate(jobs, 1.0, seed=0)] == [0.0, 0.5, 0.75, 4.0]


@pytest.mark.skipif(not DATA.exists(), reason="the public traces are not available")
def test_the_public_traces_are_parsed():
    for name in ("azure-llm-2023-code.csv", "azure-llm-2023-conv.csv", "mooncake-conversation.jsonl"):
        jobs = trace_jobs(DATA / name, 200, **{**OPTIONS, "length_scale": 0.05})
        assert len(jobs) == 200
        times = [job.at for job in jobs]
        assert times == sorted(times)
