"""Cost of the scheduler: microseconds per step for schedule + update, without the runner.

    python bench/scheduler.py                    steady decodes at 16 … 4096 sequences, prefills, a mixed trace
    python bench/scheduler.py --peer mypkg.sched:make    compare with another scheduler, in turns

Prefix caching is on, blocks hold 16 tokens, all features are compiled in. A peer is a function `make(num_seqs,
prompt_len, max_tokens)` that returns an object with `step()`, one schedule + update with made-up tokens, whose
sequences already decode. Runs alternate, so that both see the same conditions; figures are medians over steps.
"""

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import tokenizers

from treadle.core.clock import SystemClock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.engine import Engine
from treadle.scheduler import Scheduler, StepPlan, StepResult
from treadle.text.output_processor import OutputProcessor
from treadle.text.tokenizer import Tokenizer

BLOCK_SIZE = 16


class Steps(Protocol):
    def step(self) -> object: ...


class TreadleSteps:
    """Treadle's scheduler with a runner that returns made-up tokens immediately."""

    def __init__(
        self, num_seqs: int, max_model_len: int, max_num_batched_tokens: int, num_blocks: int, headroom: int = 1
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                admission_headroom=headroom,
            ),
            CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        )
        self.num_added = 0
        self.runner_s = 0.0

    def add(self, prompt_len: int, max_tokens: int) -> None:
        prompt = np.random.default_rng(self.num_added).integers(1, 1000, prompt_len)
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(str(self.num_added), prompt, params, stop_token_ids=frozenset({0}))
        self.num_added += 1
        self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        before = time.perf_counter()
        result = made_up(plan)
        self.runner_s += time.perf_counter() - before
        self.scheduler.update(plan, result)
        self.scheduler.take_finished()
        return plan


def made_up(plan: StepPlan) -> StepResult:
    return StepResult(np.full(int(plan.samples.sum()), 7, dtype=np.int32))


def steady(num_seqs: int, prompt_len: int, max_tokens: int) -> TreadleSteps:
    """Sequences that all decode."""
    max_model_len = prompt_len + max_tokens
    steps = TreadleSteps(num_seqs, max_model_len, max(8192, num_seqs), num_seqs * (max_model_len // BLOCK_SIZE + 2))
    for _ in range(num_seqs):
        steps.add(prompt_len, max_tokens)
    while steps.scheduler.waiting or steps.scheduler.batch.num_prefilling:
        steps.step()
    steps.runner_s = 0.0
    return steps


def microseconds(steps: Steps, count: int) -> list[float]:
    times = []
    for _ in range(count):
        runner_before = getattr(steps, "runner_s", 0.0)
        before = time.perf_counter()
        steps.step()
        elapsed = time.perf_counter() - before - (getattr(steps, "runner_s", 0.0) - runner_before)
        times.append(elapsed * 1e6)
    return times


def bench_steady(sizes: list[int], count: int, peer: Callable[..., Steps] | None) -> None:
    print(f"steady decode, prompt 128, {count} steps: µs per step")
    head = f"{'sequences':>10} {'median':>8} {'mean':>8} {'p99':>8} {'per seq':>8}"
    print(head + (f" {'peer':>10} {'peer / Treadle':>15}" if peer else ""))
    for size in sizes:
        # Long enough that no sequence ends: the first ones decode while the last prompts are computed.
        max_tokens = count + size // 32 + 20
        ours = steady(size, 128, max_tokens)
        other = peer(size, 128, max_tokens) if peer else None
        gc.collect()
        gc.freeze()
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(4):  # in turns
            mine += microseconds(ours, count // 4)
            if other is not None:
                theirs += microseconds(other, count // 4)
        gc.unfreeze()
        median = statistics.median(mine)
        p99 = sorted(mine)[int(len(mine) * 0.99)]
        line = f"{size:>10} {median:>8.1f} {statistics.mean(mine):>8.1f} {p99:>8.1f} {median / size:>8.3f}"
        if theirs:
            line += f" {statistics.median(theirs):>10.1f} {statistics.median(theirs) / median:>15.2f}"
        print(line, flush=True)


def bench_prefill(count: int) -> None:
    print("\nprefill steps, prompts of 512 tokens in chunks of 512: µs per step")
    steps = TreadleSteps(256, 1024, 512, 40_000)
    for _ in range(count + 10):
        steps.add(512, 1)
    times = microseconds(steps, count)
    print(f"{'':>10} {statistics.median(times):>8.1f}")


def bench_mixed(count: int) -> None:
    print("\nmixed trace, 256 seats, arrivals and ends at about 2 a step, pool of 4,000 blocks: µs per step")
    steps = TreadleSteps(256, 1024, 1024, 4_000)
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 512, 4 * count), rng.integers(16, 256, 4 * count)
    added, times = 0, []
    for _ in range(count):
        for _ in range(int(rng.poisson(2))):
            steps.add(int(lengths[0][added]), int(lengths[1][added]))
            added += 1
        times += microseconds(steps, 1)
    running, waiting = len(steps.scheduler.batch), len(steps.scheduler.waiting)
    print(f"{'':>10} {statistics.median(times):>8.1f}   mean {statistics.mean(times):.1f}, "
          f"at the end {running} run and {waiting} wait")  # fmt: skip


def bench_pressed(sizes: list[int]) -> None:
    print("\npool of 0.7 of the blocks that all need in the end, prompts of 128 to 143, 256 new tokens: µs per step")
    print(f"{'sequences':>10} {'calm':>8} {'preempting':>11} {'mean':>8} {'max':>8} {'steps':>6} {'ratio':>6}")
    for size in sizes:
        steps = TreadleSteps(size, 16 + 128 + 256, max(8192, size), int(0.7 * size * 25))
        for i in range(size):
            steps.add(128 + i % BLOCK_SIZE, 256)
        gc.collect()
        gc.freeze()
        calm, pressed = [], []
        while steps.scheduler.num_unfinished_requests:
            runner_before, before = steps.runner_s, time.perf_counter()
            plan = steps.step()
            elapsed = (time.perf_counter() - before - (steps.runner_s - runner_before)) * 1e6
            if steps.scheduler.report.preempted:
                pressed.append(elapsed)
            elif plan.num_decodes == size:
                calm.append(elapsed)
        gc.unfreeze()
        print(f"{size:>10} {statistics.median(calm):>8.1f} {statistics.median(pressed):>11.1f} "
              f"{statistics.mean(pressed):>8.1f} {max(pressed):>8.1f} {len(pressed):>6} "
              f"{statistics.median(pressed) / statistics.median(calm):>6.1f}", flush=True)  # fmt: skip


def bench_edge(sizes: list[int]) -> None:
    print("\nall rows at a block edge at once, blocks for half of them, no headroom: µs for that step")
    print(f"{'sequences':>10} {'step':>8} {'preempted':>10}")
    for size in sizes:
        times, num_preempted = [], 0
        for _ in range(3):
            steps = TreadleSteps(size, 256, max(8192, 128 * size), size * 8 + size // 2, headroom=0)
            for _ in range(size):
                steps.add(127, 16)
            steps.step()  # prompts
            steps.step()  # token 128 fills the eighth block
            before = time.perf_counter()
            steps.scheduler.schedule()
            times.append((time.perf_counter() - before) * 1e6)
            num_preempted = len(steps.scheduler.report.preempted)
        print(f"{size:>10} {min(times):>8.1f} {num_preempted:>10}", flush=True)


def bench_waiting_streams(counts: list[int]) -> None:
    print("\n64 streams decode and others wait for a seat: µs per Engine.step, without the runner")
    print(f"{'waiting':>10} {'median':>8}")
    for count in counts:
        vocabulary = tokenizers.models.WordLevel({str(i): i for i in range(100)}, unk_token="0")
        steps = TreadleSteps(64, 1024, 8192, 64 * 70)
        engine = Engine(steps.scheduler, MadeUpRunner(), OutputProcessor(Tokenizer(tokenizers.Tokenizer(vocabulary))),
                        SystemClock())  # fmt: skip
        params = SamplingParams(max_tokens=800, detokenize=False, ignore_eos=True)
        for i in range(64 + count):
            engine.add_request(Request(str(i), [5] * 16, params), stream=True)
        times = []
        for _ in range(150):
            before = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - before) * 1e6)
        print(f"{count:>10} {statistics.median(times[20:]):>8.1f}", flush=True)


class MadeUpRunner:
    supports_lora = False

    def execute(self, plan: StepPlan) -> StepResult:
        return made_up(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--peer", metavar="MODULE:FUNCTION", help="another scheduler to compare with")
    args = parser.parse_args()
    peer = None
    if args.peer:
        module, _, function = args.peer.partition(":")
        peer = getattr(importlib.import_module(module), function)
    bench_steady(args.sizes, args.steps, peer)
    bench_prefill(args.steps)
    bench_mixed(args.steps)
    bench_pressed([64, 256, 1024])
    bench_edge([128, 512, 1024])
    bench_waiting_streams([0, 1000, 10_000])


if __name__ == "__main__":
    main()
