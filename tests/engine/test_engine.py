"""The engine loop: failing steps, observers, the step table."""

import re
from dataclasses import replace

import numpy as np
import pytest

from support.engines import TestEngine
from treadle import SamplingParams
from treadle.core.errors import EngineError
from treadle.engine.observers import StatsLogger
from treadle.trace.step_table import StepTableObserver

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class FailsOnce:
    """A runner that fails in one step."""

    supports_lora = False

    def __init__(self, step, error=None):
        self.step, self.error = step, error or ValueError("broken")

    def __call__(self, runner):
        self.runner = runner
        return self

    def execute(self, plan):
        if plan.step == self.step:
            raise self.error
        return self.runner.execute(plan)


def test_a_failing_step_fails_only_its_requests(tiny, caplog):
    engine = TestEngine(tiny.loaded, tiny.weights, runner=FailsOnce(3), max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(4):
        engine.add(str(i), [10 + i] * 6, GREEDY)
    results = engine.run()
    assert "step 3 failed" in caplog.text
    failed = {name for name, output in results.items() if output.outputs[0].finish_reason == "error"}
    assert failed == {"0", "1"}
    for name, output in results.items():
        if name in failed:
            assert output.error == "EngineError: step 3 failed: ValueError('broken')"
            assert output.finished
        else:
            assert len(output.outputs[0].token_ids) == 6
            assert output.error is None
    engine.add("later", [1, 2, 3], GREEDY)
    assert len(engine.run()["later"].outputs[0].token_ids) == 6


class Changes:
    """A runner whose result of one step is changed."""

    supports_lora = False

    def __init__(self, step, change):
        self.step, self.change = step, change

    def __call__(self, runner):
        self.runner = runner
        return self

    def execute(self, plan):
        result = self.runner.execute(plan)
        return self.change(result) if plan.step == self.step else result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: None, "the runner returned None instead of a StepResult"),
        (lambda r: replace(r, token_ids=r.token_ids[:-1]), r"token_ids of the result must be int32 \[2\], got int32 \[1\]"),
        (lambda r: replace(r, token_ids=r.token_ids[:, None]), r"must be int32 \[2\], got int32 \[2, 1\]"),
        (lambda r: replace(r, token_ids=r.token_ids.astype(float)), r"must be int32 \[2\], got float64 \[2\]"),
        (lambda r: replace(r, token_ids=None), r"must be int32 \[2\], got None"),
        (lambda r: replace(r, num_accepted=np.ones(2, np.int32)), "no drafts, but the runner returned num_accepted"),
        (lambda r: replace(r, candidates={0: ((1, 0.0),)}), r"entries \[\] ask for candidates, got those of \[0\]"),
        (lambda r: replace(r, logprobs={2: None}), "logprobs of the result has an entry for 2, which is not in the step"),
        (lambda r: replace(r, prompt_logprobs={0: ()}), "prompt_logprobs of the result has an entry for 0"),
        (lambda r: replace(r, drafts={99: np.ones(1, np.int32)}), "drafts of the result has an entry for 99"),
        (lambda r: replace(r, errors=((99, "?"),)), "errors of the result has an entry for 99"),
    ],
)  # fmt: skip
def test_a_result_of_another_form_fails_only_its_step(change, message, tiny):
    engine = TestEngine(
        tiny.loaded, tiny.weights, runner=Changes(3, change), max_num_seqs=2, max_num_batched_tokens=16
    )
    for i in range(3):
        engine.add(str(i), [10 + i] * 6, GREEDY)
    results = engine.run()
    assert {name for name, output in results.items() if output.error is not None} == {"0", "1"}
    assert re.search(message, results["0"].error)
    assert len(results["2"].outputs[0].token_ids) == 6


@pytest.mark.parametrize("part", ["schedule", "update", "take_finished"])
def test_a_fault_of_the_scheduler_ends_the_engine(part, tiny, monkeypatch):
    engine = TestEngine(tiny.loaded, tiny.weights)
    engine.add("a", [1, 2, 3], GREEDY)
    engine.engine.step()

    def fail(*args):
        raise ValueError("broken")

    monkeypatch.setattr(engine.scheduler, part, fail)
    message = r"the engine has failed in step 2: ValueError\('broken'\)"
    if part == "schedule":
        message = r"the engine has failed in step 1: ValueError\('broken'\)"
    with pytest.raises(EngineError, match=message):
        engine.engine.step()
    monkeypatch.undo()
    assert not engine.engine.has_unfinished_requests
    engine.engine.abort_request("a")
    for call in (engine.engine.step, lambda: engine.add("b", [1], GREEDY)):
        with pytest.raises(EngineError, match=message):
            call()
    assert str(engine.engine.error).startswith("the engine has failed")


def test_an_output_that_cannot_be_made_ends_its_request_alone(tiny, monkeypatch):
    decode = type(tiny.loaded.tokenizer).decode

    def fail(self, token_ids, **options):
        if 7 in token_ids:
            raise ValueError("broken")
        return decode(self, token_ids, **options)

    monkeypatch.setattr(type(tiny.loaded.tokenizer), "decode", fail)
    engine = TestEngine(tiny.loaded, tiny.weights)
    bad = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=[7])
    engine.add("bad", [1, 2, 3], bad)
    engine.add("bad stream", [1, 2, 3], bad, stream=True)
    engine.add("good", [1, 2, 3], GREEDY)
    results = engine.run()
    assert results["bad"].outputs[0].token_ids == [7] * 6
    for name in ("bad", "bad stream"):
        assert results[name].error == "EngineError: the output cannot be processed: ValueError('broken')"
        assert results[name].outputs[0].finish_reason == "error"
    assert results["good"].error is None
    assert results["good"].outputs[0].text


def test_an_interrupted_step_frees_its_blocks(tiny):
    engine = TestEngine(tiny.loaded, tiny.weights, runner=FailsOnce(2, KeyboardInterrupt()))
    engine.add("a", [1, 2, 3], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    kv = engine.scheduler.kv
    assert kv.num_available_blocks == kv.pool.num_blocks
    assert engine.run()["a"].outputs[0].finish_reason == "error"


def test_an_aborted_request_returns_its_partial_output(tiny):
    engine = TestEngine(tiny.loaded, tiny.weights)
    engine.add("a", [1, 2, 3], GREEDY)
    engine.add("b", [1, 2, 3, 4], GREEDY)

    def abort(step):
        if step == 4:
            engine.engine.abort_request("a")

    results = engine.run(abort)
    assert results["a"].outputs[0].finish_reason == "abort"
    assert len(results["a"].outputs[0].token_ids) == 3
    assert len(results["b"].outputs[0].token_ids) == 6


def test_the_step_table_shows_what_each_request_did(tiny):
    # Three requests of 2 to 8 tokens in a pool of 5 blocks of 4, 8 tokens a step.
    engine = TestEngine(
        tiny.loaded, tiny.weights, num_blocks=5, block_size=4, max_num_seqs=4, max_num_batched_tokens=8,
        admission_headroom=0, enable_prefix_caching=False,
    )  # fmt: skip
    steps = StepTableObserver(engine.scheduler.cache_config.num_blocks, engine.engine.clock)
    engine.engine.add_observer(steps)
    engine.add("a", [5] * 2, GREEDY)
    engine.add("b", [6] * 8, GREEDY)
    engine.add("c", [7] * 4, GREEDY)
    engine.run()
    text = steps.table.render()
    assert text.splitlines()[0].split() == ["step", "tokens", "a", "b", "c"]
    assert "prefill 6 of 8" in text
    assert "prefill 6+2 of 8" in text
    assert "waiting: token budget used up" in text
    assert "preempted" in text
    assert "re-prefill" in text
    assert text.count("→ end: length") == 3


def test_stats_are_logged_once_per_interval(tiny, caplog):
    caplog.set_level("INFO", logger="treadle")
    engine = TestEngine(tiny.loaded, tiny.weights)
    engine.engine.add_observer(StatsLogger(engine.engine.stats, engine.engine.clock, interval_s=1e-9))
    engine.add("a", [1, 2, 3], GREEDY)
    engine.run()
    lines = [r.message for r in caplog.records if r.message.startswith("prompt ")]
    assert len(lines) == 6
    assert "running 1, waiting 0" in lines[0]
