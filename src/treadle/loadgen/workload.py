"""Workloads: random prompts, or the lengths and arrivals of a public trace."""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from treadle.core.errors import UsageError

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""Paths of the endpoints, by name."""

LOWEST_TOKEN_ID = 100
"""Many vocabularies have special tokens below this id."""

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send.

    Attributes:
        prompt: token ids.
        max_tokens: tokens to generate.
        at: when to send it, in seconds after the start; None for as soon as another request has ended.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    at: float | None = None


def random_jobs(count: int, prompt_len: int, output_len: int, *, vocab_size: int, seed: int) -> list[Job]:
    """Jobs with prompts of random tokens, all of one length, without shared prefixes."""
    rng = random.Random(seed)
    return [Job(_tokens(rng, prompt_len, vocab_size), output_len) for _ in range(count)]


def trace_jobs(path: Path, count: int, *, length_scale: float, max_len: int, vocab_size: int, seed: int) -> list[Job]:
    """The first requests of a trace, with its arrivals.

    Reads Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's JSON lines (timestamp in ms,
    input_length, output_length, hash_ids). Traces hold no text, so prompts are random tokens; prompts of a Mooncake
    trace share a prefix where their hash ids, one per 512 tokens, agree.

    Args:
        path: the trace.
        count: number of requests to take.
        length_scale: factor on all lengths.
        max_len: maximum length of prompt and output together; longer requests are cut, the prompt first.
        vocab_size: upper bound of token ids (exclusive).
        seed: seed of the prompts.

    Raises:
        UsageError: the file cannot be read, or has neither format.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _read_mooncake if path.suffix == ".jsonl" else _read_azure
            rows = list(islice(read(file), count))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            "--trace", f"{path} cannot be read as Azure's CSV or Mooncake's JSON lines ({error!r})"
        ) from error
    if not rows:
        raise UsageError("--trace", f"{path} holds no requests")
    jobs = []
    for number, (at, prompt_len, output_len, hash_ids) in enumerate(rows):
        output_len = min(max(1, round(output_len * length_scale)), max_len - 1)
        prompt_len = min(max(1, round(prompt_len * length_scale)), max_len - output_len)
        block = max(1, round(MOONCAKE_BLOCK * length_scale))
        prompt: list[int] = []
        for hash_id in hash_ids:
            prompt += _tokens(random.Random(f"{seed} {hash_id}"), block, vocab_size)
        own = random.Random(f"{seed} request {number}")
        prompt += _tokens(own, max(0, prompt_len - len(prompt)), vocab_size)
        jobs.append(Job(tuple(prompt[:prompt_len]), output_len, at - rows[0][0]))
    return jobs


def at_rate(jobs: Sequence[Job], rate: float, *, seed: int) -> list[Job]:
    """Set arrivals to a mean rate in requests/s: the scaled times of a trace, or else a Poisson process."""
    last = jobs[-1].at
    if last:
        factor = len(jobs) / last / rate
        return [replace(job, at=(job.at or 0.0) * factor) for job in jobs]
    rng, now, timed = random.Random(seed), 0.0, []
    for job in jobs:
        timed.append(replace(job, at=now))
        now += rng.expovariate(rate)
    return timed


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(min(LOWEST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(count))


_Row = tuple[float, int, int, Sequence[int]]


def _read_azure(lines: Iterable[str]) -> Iterator[_Row]:
    for row in csv.DictReader(lines):
        # Timestamps have seven decimals; Python parses six.
        time = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")
        yield time.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _read_mooncake(lines: Iterable[str]) -> Iterator[_Row]:
    for line in lines:
        row = json.loads(line)
        yield row["timestamp"] / 1e3, row["input_length"], row["output_length"], row["hash_ids"]
