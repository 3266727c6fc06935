"""The cost of a step in Python calls, which is the same on every machine."""

import sys

import numpy as np
import pytest
import tokenizers

from treadle.core.clock import VirtualClock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.engine import Engine
from treadle.scheduler import Scheduler, StepResult
from treadle.testing.toy import ToyRunner, toy_request
from treadle.text.output_processor import OutputProcessor
from treadle.text.tokenizer import Tokenizer

BLOCK = 16


class Fives:
    """A runner that samples token 5 for every sequence, for steps that only decode."""

    def execute(self, plan):
        return StepResult(np.full(len(plan.rows), 5, dtype=np.int32))


def count_calls(function, *args) -> int:
    """Return the number of Python calls made by `function`, builtins included."""
    count = 0

    def on_event(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def new_scheduler(num_seqs: int, num_blocks: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs, max_num_batched_tokens=64 * num_seqs, max_model_len=200, admission_headroom=0
        ),
        CacheConfig(num_blocks=num_blocks, num_host_blocks=0, block_size=BLOCK, enable_prefix_caching=False),
        VirtualClock(),
    )


def decoding(num_seqs: int, num_blocks: int, num_waiting: int = 0) -> Scheduler:
    """Return a scheduler with `num_seqs` sequences of 20 tokens that were just prefilled."""
    scheduler = new_scheduler(num_seqs, num_blocks)
    for i in range(num_seqs + num_waiting):
        scheduler.add(toy_request(str(i), [(7 * i + k) % 50 for k in range(20)], max_tokens=100))
    plan = scheduler.schedule()
    scheduler.update(plan, ToyRunner(num_blocks, BLOCK, max_model_len=200).execute(plan))
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, Fives().execute(plan))


def plan_into(plans: list, scheduler: Scheduler) -> None:
    plans.append(scheduler.schedule())


def test_a_plain_decode_step_makes_the_same_number_of_calls_for_any_batch_size():
    """This includes steps with rows at a block edge, and steps with waiting requests."""
    costs = []
    for num_seqs in (16, 256):
        scheduler = decoding(num_seqs, 20 * num_seqs, num_waiting=5)
        costs.append([count_calls(step, scheduler) for _ in range(40)])
    assert costs[0] == costs[1]
    assert max(costs[1]) < 250


@pytest.mark.parametrize("num_victims", [1, 4])
def test_the_cost_of_preemptions_is_proportional_to_the_victims(num_victims):
    """All rows are at a block edge. Preempted rows add to the cost; rows that decode or take a block do not."""
    costs, plans = [], []
    for num_seqs in (16, 256):
        # Each row holds two blocks and needs a third in the same step. A victim needs none and frees its two blocks.
        scheduler = decoding(num_seqs, 3 * num_seqs - 3 * num_victims)
        calm = count_calls(step, scheduler)
        while scheduler.batch.num_tokens[scheduler.batch.rows[0]] < 2 * BLOCK + 1:
            step(scheduler)
        pressed = count_calls(plan_into, plans, scheduler)
        assert len(scheduler.report.preempted) == num_victims
        costs.append(pressed - calm)
    assert costs[1] <= costs[0] + 20
    assert costs[1] <= 150 * num_victims


def test_collect_visits_only_the_streams_that_got_a_token():
    vocabulary = tokenizers.models.WordLevel({str(i): i for i in range(50)}, unk_token="0")
    costs = []
    for num_waiting in (0, 500):
        engine = Engine(
            new_scheduler(8, 200), ToyRunner(200, BLOCK, max_model_len=200), OutputProcessor(Tokenizer(tokenizers.Tokenizer(vocabulary))),
            VirtualClock(),
        )  # fmt: skip
        for i in range(8 + num_waiting):
            params = SamplingParams(max_tokens=50, detokenize=False)
            engine.add_request(Request(str(i), [5] * 8, params), stream=True)
        for _ in range(3):
            engine.step()
        costs.append(count_calls(engine.step))
    assert abs(costs[1] - costs[0]) < 100
