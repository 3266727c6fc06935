"""Compares the server with the offline engine: same requests, same cores, with the client on them too.

    python bench/server.py

Offline: LLM.generate on all requests at once. Server: `treadle serve` in a process of its own, all requests as
concurrent streams of a client in this process. Runs alternate, with fresh prompts each time. Reports output tokens/s
of both and their ratio; the time between chunks of a stream while all decode, and the offline step time for the same
number of sequences; the latency of /health under load; the seconds from the command to the first 200.
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import httpx2
import uvloop

from treadle import LLM, SamplingParams
from treadle.core.config import DEFAULT_MODEL
from treadle.core.request import Request
from treadle.loadgen.client import Result, Target, run
from treadle.loadgen.report import percentile
from treadle.loadgen.workload import Job, random_jobs
from treadle.scheduler import StepOutputs, StepReport


async def stream_all(url: str, jobs: list[Job]) -> tuple[list[Result], list[float]]:
    """Run all jobs at once; returns their results, and the latencies of /health meanwhile."""
    results: list[Result] = []
    healths: list[float] = []

    async def watch() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            while True:
                start = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                healths.append(time.perf_counter() - start)
                await asyncio.sleep(0.1)

    target = Target(base_url=url, model=DEFAULT_MODEL, extra={"temperature": 0.0})
    watcher = asyncio.create_task(watch())
    await run(target, jobs, concurrency=len(jobs), on_end=results.append)
    watcher.cancel()
    assert all(r.error is None and r.output_tokens == job.max_tokens for r, job in zip(results, jobs, strict=True))
    return results, healths


def steady_gaps(results: list[Result]) -> list[float]:
    """Times between chunks while all streams decode: no prompt is being computed, and no stream has ended."""
    begin = max(result.tokens_at[0] for result in results)
    end = min(result.tokens_at[-1] for result in results)
    return [
        after - before
        for result in results
        for before, after in pairwise(result.tokens_at)
        if begin < before and after < end
    ]


class StepTimes:
    """An observer that times the decode-only steps of an engine."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.times: list[float] = []

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        if report is not None and report.plan.num_decodes == self._count == len(report.plan.rows):
            self.times.append(time.monotonic() - report.time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--quantization", "int8", "--kv-cache-memory", "1G", "--port", str(port)]
    start = time.perf_counter()
    server = subprocess.Popen([sys.executable, "-m", "treadle", "-q", "serve", *options])
    try:
        while True:
            try:
                if httpx2.get(url + "/health").status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.02)
        print(f"from the command to the first /health 200: {time.perf_counter() - start:.2f} s")
        llm = LLM(quantization="int8", kv_cache_memory="1G", log_stats_interval_s=0)
        step_times = StepTimes(args.streams)
        llm.engine.add_observer(step_times)
        params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, temperature=0.0, detokenize=True)
        num_tokens = args.streams * args.new_tokens
        ratios, steady, gaps, healths = [], [], [], []
        for i in range(args.rounds + 1):
            shape = {"prompt_len": args.prompt_len, "output_len": args.new_tokens, "vocab_size": 40_000}
            jobs = random_jobs(args.streams, **shape, seed=2 * i)
            begin = time.perf_counter()
            llm.generate([{"prompt_token_ids": job.prompt} for job in jobs], params, use_tqdm=False)
            offline = time.perf_counter() - begin
            results, new_healths = uvloop.run(stream_all(url, random_jobs(args.streams, **shape, seed=2 * i + 1)))
            online = max(result.ended for result in results) - min(result.sent for result in results)
            if i == 0:
                step_times.times.clear()
                continue  # warm-up
            ratios.append(offline / online)
            steady += steady_gaps(results)
            gaps += [gap for result in results for gap in result.itls]
            healths += new_healths
            print(
                f"offline {num_tokens / offline:7.0f} tokens/s   server {num_tokens / online:7.0f}   {ratios[-1]:.2f}"
            )
    finally:
        server.terminate()
        server.wait()
    print(f"server / offline, median: {statistics.median(ratios):.2f}")
    step = statistics.median(step_times.times)
    for name, values in (("while all decode", steady), ("with the prompts at the start", gaps)):
        print(
            f"between chunks, {name}: median {statistics.median(values) * 1e3:.1f} ms, "
            f"p99 {percentile(values, 0.99) * 1e3:.1f} ms ({percentile(values, 0.99) / step:.2f} offline steps)"
        )
    slow_step = percentile(step_times.times, 0.99)
    print(f"offline, a step of {args.streams} decodes: median {step * 1e3:.1f} ms, p99 {slow_step * 1e3:.1f} ms")
    print(f"/health: median {statistics.median(healths) * 1e3:.1f} ms, max {max(healths) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
