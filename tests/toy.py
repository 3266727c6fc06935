"""A runner whose next token is a hash of the whole history, read through the block tables.

Any block lost, shared wrongly, written twice or read before it is written changes the tokens, so equality
with `toy_continuation`, which knows no blocks, shows that scheduler and cache kept every token in place.
"""

import zlib

import numpy as np

from treadle.clock import VirtualClock
from treadle.config import CacheConfig, SchedulerConfig
from treadle.request import Request
from treadle.sampling_params import SamplingParams
from treadle.scheduler import Scheduler, SequenceResult, StepPlan, StepResult, check_invariants

VOCAB_SIZE = 50
NEVER_WRITTEN = -7


def toy_next_token(history) -> int:
    return zlib.crc32(np.asarray(history, dtype=np.int32).tobytes()) % VOCAB_SIZE


def toy_continuation(prompt, max_tokens, stop_ids=frozenset(), max_model_len=10**9) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and len(tokens) < max_model_len:
        tokens.append(toy_next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class ToyRunner:
    """Keeps the token ids where a real runner keeps keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), NEVER_WRITTEN, dtype=np.int32)

    def execute(self, plan: StepPlan) -> StepResult:
        # As on a real runner, the step's tokens are all written before any of them is read.
        for s in plan.sequences:
            for position in range(s.start, s.start + s.count):
                self._write(plan, s.row, position)
        for row in plan.decode_rows.tolist():
            self._write(plan, row, int(plan.batch.num_computed_tokens[row]))
        sequences = tuple(
            SequenceResult((self._sample(plan, s.row, s.start + s.count),) if s.num_samples else ())
            for s in plan.sequences
        )
        decodes = [
            self._sample(plan, row, int(plan.batch.num_computed_tokens[row]) + 1)
            for row in plan.decode_rows.tolist()
        ]
        return StepResult(sequences, np.array(decodes, dtype=np.int32))

    def _write(self, plan, row, position):
        block = plan.block_tables[row, position // self.block_size]
        self.slots[block, position % self.block_size] = plan.batch.token_ids[row, position]

    def _sample(self, plan, row, length):
        blocks = plan.block_tables[row, : -(-length // self.block_size)]
        history = self.slots[blocks].reshape(-1)[:length]
        assert (history != NEVER_WRITTEN).all(), "a slot was read before it was written"
        return toy_next_token(history)


def toy_request(request_id, prompt, max_tokens=16, stop_ids=(), **kwargs) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=list(stop_ids))
    return Request(request_id, prompt, params, stop_token_ids=frozenset(stop_ids), **kwargs)


class ToyEngine:
    """Scheduler and toy runner in the loop, with every invariant checked in every step."""

    def __init__(self, *, num_blocks=64, block_size=4, enable_prefix_caching=True, **scheduler) -> None:
        scheduler.setdefault("max_model_len", num_blocks * block_size)
        scheduler.setdefault("max_num_seqs", 8)
        scheduler.setdefault("max_num_batched_tokens", 16)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            SchedulerConfig(**scheduler),
            CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                enable_prefix_caching=enable_prefix_caching,
            ),
            self.clock,
        )
        self.runner = ToyRunner(num_blocks, block_size)
        self.plans: list[StepPlan] = []
        self.finished: dict[str, Request] = {}

    def add(self, *args, **kwargs) -> Request:
        request = toy_request(*args, arrival_time=self.clock.now(), **kwargs)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        check_invariants(self.scheduler, plan)
        self.scheduler.update(plan, self.runner.execute(plan))
        self.clock.advance(1.0)
        check_invariants(self.scheduler)
        self.plans.append(plan)
        self.collect()
        return plan

    def collect(self) -> None:
        for request in self.scheduler.take_finished():
            assert request.request_id not in self.finished, "a request was finished twice"
            self.finished[request.request_id] = request

    def run(self, max_steps=10_000) -> dict[str, list[int]]:
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished_requests:
                break
            self.step()
        else:
            raise AssertionError(f"requests are unfinished after {max_steps} steps")
        self.collect()
        return {name: r.sequences[0].output_token_ids for name, r in self.finished.items()}
