"""Preemptions in a pool that holds about three of 24 requests, with and without headroom.

    python bench/thrash.py

The scheduler alone, with made-up tokens: prompts of 100 to 160 tokens, 100 to 150 new ones, blocks of 16. No clock is
involved, so the figures are the same everywhere.
"""

import argparse

import numpy as np

from scheduler import made_up
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.scheduler import Scheduler


def run(policy: str, mode: str, headroom: int) -> tuple[float, int, int, int]:
    """Preemptions per request, the most of any request, steps, and tokens computed."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=320,
            max_num_seqs=24,
            max_num_batched_tokens=512,
            scheduler=policy,
            preemption_mode=mode,
            admission_headroom=headroom,
        ),
        CacheConfig(num_blocks=50, num_host_blocks=100, block_size=16, enable_prefix_caching=False),
    )
    for i in range(24):
        params = SamplingParams(max_tokens=100 + i * 13 % 51)
        scheduler.add(Request(str(i), np.full(100 + i * 7 % 61, i), params))
    finished, steps, tokens = [], 0, 0
    while scheduler.num_unfinished_requests:
        plan = scheduler.schedule()
        scheduler.update(plan, made_up(plan))
        finished += scheduler.take_finished()
        steps += 1
        tokens += plan.num_batched_tokens
    preemptions = [request.metrics.num_preemptions for request in finished]
    return sum(preemptions) / len(preemptions), max(preemptions), steps, tokens


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print("| policy | preemption mode | headroom | preemptions per request | most | steps | tokens computed |")
    print("|---|---|---|---|---|---|---|")
    for policy in ("chunked", "three-phase", "prefill-first", "phased"):
        for mode in ("recompute", "swap"):
            for headroom in (0, 1, 2):
                mean, most, steps, tokens = run(policy, mode, headroom)
                print(f"| {policy} | {mode} | {headroom} | {mean:.2f} | {most} | {steps} | {tokens} |")


if __name__ == "__main__":
    main()
