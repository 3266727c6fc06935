"""The server against the offline engine: the same requests, on the same cores, the client on them too.

    python bench/server.py

Offline: LLM.generate on all requests at once. Server: `treadle serve` in a process of its own, all requests as
concurrent streams of a client in this one. In turns, fresh prompts each time. Reported: output tokens/s of both and
their ratio; time between the chunks of a stream, beside the offline step; how long /health takes meanwhile; seconds
from the command to the first 200.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time

import httpx

from treadle import LLM, SamplingParams


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


async def stream_all(url: str, batch: list[list[int]], max_tokens: int) -> tuple[float, list[float], list[float]]:
    """Seconds for all; times between chunks; times of /health."""
    gaps: list[float] = []
    healths: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def one(ids: list[int]) -> int:
            body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
            count, last = 0, None
            async with client.stream("POST", url + "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        json.loads(line[6:])
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(now - last)
                        count, last = count + 1, now
            return count

        async def watch() -> None:
            while True:
                start = time.perf_counter()
                assert (await client.get(url + "/health")).status_code == 200
                healths.append(time.perf_counter() - start)
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(watch())
        start = time.perf_counter()
        counts = await asyncio.gather(*(one(ids) for ids in batch))
        elapsed = time.perf_counter() - start
        watcher.cancel()
    assert counts == [max_tokens] * len(batch), counts
    return elapsed, gaps, healths


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
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        print(f"from the command to the first /health 200: {time.perf_counter() - start:.2f} s")
        llm = LLM(quantization="int8", kv_cache_memory="1G", log_stats_interval_s=0)
        params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, temperature=0.0, detokenize=True)
        num_tokens = args.streams * args.new_tokens
        ratios, gaps, healths, steps = [], [], [], []
        for i in range(args.rounds + 1):
            batch = prompts(2 * i, args.streams, args.prompt_len)
            begin, steps_before = time.perf_counter(), llm.engine.num_steps
            llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
            offline = time.perf_counter() - begin
            num_steps = llm.engine.num_steps - steps_before
            batch = prompts(2 * i + 1, args.streams, args.prompt_len)
            online, new_gaps, new_healths = asyncio.run(stream_all(url, batch, args.new_tokens))
            if i == 0:
                continue  # warm-up
            ratios.append(offline / online)
            gaps += new_gaps
            healths += new_healths
            steps.append(offline / num_steps)
            print(
                f"offline {num_tokens / offline:7.0f} tokens/s   server {num_tokens / online:7.0f}   {ratios[-1]:.2f}"
            )
    finally:
        server.terminate()
        server.wait()
    print(f"server / offline, median: {statistics.median(ratios):.2f}")
    print(
        f"between chunks: median {statistics.median(gaps) * 1e3:.1f} ms, p99 {percentile(gaps, 0.99) * 1e3:.1f} ms; "
        f"offline, seconds / steps: {statistics.median(steps) * 1e3:.1f} ms"
    )
    print(f"/health: median {statistics.median(healths) * 1e3:.1f} ms, most {max(healths) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
