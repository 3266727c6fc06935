"""Observers see every step and every finished request, and their counts agree with the requests."""

import random

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given

from support.examples import examples
from treadle.core.clock import VirtualClock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import Request
from treadle.core.sampling_params import SamplingParams
from treadle.engine import Engine
from treadle.scheduler import Scheduler
from treadle.testing.toy import ToyEngine, ToyRunner
from treadle.text.output_processor import OutputProcessor
from treadle.text.tokenizer import Tokenizer


class Breaking(ToyRunner):
    """Fails in the given steps."""

    broken_steps = ()

    def execute(self, plan):
        if plan.step in self.broken_steps:
            raise RuntimeError("broken")
        return super().execute(plan)


class Seen:
    def __init__(self):
        self.calls = []

    def on_step(self, report, outputs, finished):
        self.calls.append((report, outputs, [request.request_id for request in finished]))


def make_engine(*observers):
    clock = VirtualClock()
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16),
        CacheConfig(num_blocks=30, num_host_blocks=0, block_size=4),
        clock,
    )
    vocabulary = tokenizers.models.WordLevel({str(i): i for i in range(50)}, unk_token="0")
    runner = Breaking(30, 4, max_num_seqs=4, max_model_len=40)
    processor = OutputProcessor(Tokenizer(tokenizers.Tokenizer(vocabulary)))
    return Engine(scheduler, runner, processor, clock, observers), runner


def add(engine, name, length=6, max_tokens=5, **params):
    params = SamplingParams(max_tokens=max_tokens, detokenize=False, **params)
    engine.add_request(Request(name, list(range(length)), params))


def run(engine):
    results = []
    while engine.has_unfinished_requests:
        results += engine.step()
    return results


class Raising:
    def __init__(self):
        self.num_calls = 0

    def on_step(self, report, outputs, finished):
        self.num_calls += 1
        raise ValueError("a mistake in an observer")


def test_an_observer_that_raises_is_logged_once_and_removed(caplog):
    raising, before, after = Raising(), Seen(), Seen()
    engine, _ = make_engine(before, raising, after)
    add(engine, "a")
    (result,) = run(engine)
    assert len(result.outputs[0].token_ids) == 5
    assert raising.num_calls == 1
    assert len(before.calls) == len(after.calls) == 5
    assert sum("Raising" in record.message and "removed" in record.message for record in caplog.records) == 1


def test_an_interrupt_in_an_observer_loses_no_output():
    class Interrupted:
        def on_step(self, report, outputs, finished):
            if finished:
                raise KeyboardInterrupt

    engine, _ = make_engine(Interrupted())
    add(engine, "a")
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert engine.has_unfinished_requests
    (result,) = run(engine)
    assert len(result.outputs[0].token_ids) == 5


def test_observers_see_requests_that_end_between_steps():
    seen = Seen()
    engine, _ = make_engine(seen)
    add(engine, "a")
    engine.abort_request("a")
    (result,) = engine.step()
    assert result.request_id == "a"
    assert seen.calls == [(None, None, ["a"])]


def test_a_failed_step_has_a_report_and_no_outputs():
    seen = Seen()
    engine, runner = make_engine(seen)
    runner.broken_steps = (2,)
    add(engine, "a")
    (result,) = run(engine)
    assert "broken" in result.error
    (first, outputs, ended), (second, no_outputs, also_ended) = seen.calls
    assert (first.plan.step, outputs.num_prompt_tokens, outputs.num_generated_tokens, ended) == (1, 6, 1, [])
    assert (second.plan.step, no_outputs, also_ended) == (2, None, ["a"])


@examples(150)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["recompute", "swap"]),
    lookahead=st.sampled_from([0, 3]),
    beams=st.booleans(),
)
def test_token_counts_agree_with_the_requests(seed, mode, lookahead, beams):
    """Every prompt token counts once as new or cached, every output token once as generated."""
    rng = random.Random(seed)
    engine = ToyEngine(
        num_blocks=20, block_size=4, num_host_blocks=30, max_model_len=60, admission_headroom=0, preemption_mode=mode,
        num_lookahead_slots=lookahead, max_num_seqs=6, max_num_batched_tokens=24,
    )  # fmt: skip
    seen = Seen()
    engine.observers.append(seen)
    beginning = [rng.randrange(50) for _ in range(12)]
    requests = []
    for i in range(10):
        prompt = beginning[: rng.choice([0, 8, 12])] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        kind = {"use_beam_search": True} if beams and i % 4 == 3 else {}
        requests.append(engine.add(f"r{i}", prompt, rng.randrange(1, 25), n=rng.choice([1, 1, 3]), params=kind))
        for _ in range(rng.randrange(4)):
            if engine.scheduler.num_unfinished_requests:
                engine.step()
    engine.run()
    outputs = [outputs for _, outputs, _ in seen.calls]
    assert [name for _, _, finished in seen.calls for name in finished] == list(engine.finished)
    num_known = sum(report.plan.num_prompt_tokens for report, _, _ in seen.calls)
    # The difference is the last token before each preemption, which was generated but not computed before.
    assert sum(o.num_prompt_tokens + o.num_recomputed_tokens for o in outputs) <= num_known
    plain = [r for r in requests if not r.sampling_params.use_beam_search]
    generated = sum(seq.num_output_tokens for r in plain for seq in r.sequences)
    assert sum(len(o.token_ids) for o in outputs) == generated
    if len(plain) == len(requests):
        assert sum(o.num_generated_tokens for o in outputs) == generated
        assert sum(len(o.first_token_waits) for o in outputs) == len(requests)
        first_tokens = sum(1 for o in outputs for gap in o.token_gaps if gap != gap)
        assert first_tokens == sum(len(r.sequences) for r in requests)
    # Prompt tokens are either cached or computed for the first time; without preemptions this holds for all of them.
    num_prompt = sum(len(r.prompt_token_ids) for r in requests)
    num_new, num_cached = sum(o.num_prompt_tokens for o in outputs), sum(o.num_cached_tokens for o in outputs)
    assert num_cached == sum(r.metrics.num_cached_tokens for r in requests)
    assert num_new + num_cached <= num_prompt
    if not any(report.preempted for report, _, _ in seen.calls):
        assert sum(o.num_prompt_tokens for o in outputs) == num_known
        assert num_new + num_cached == num_prompt
        assert sum(o.num_recomputed_tokens for o in outputs) == 0


@pytest.mark.parametrize("lookahead", [0, 2])
def test_each_beam_counts_as_one_generated_token(lookahead):
    engine = ToyEngine(num_lookahead_slots=lookahead)
    seen = Seen()
    engine.observers.append(seen)
    engine.add("beams", [1, 2, 3], 6, n=3, params={"use_beam_search": True})
    engine.run()
    assert [outputs.num_generated_tokens for _, outputs, _ in seen.calls] == [3] * 6
