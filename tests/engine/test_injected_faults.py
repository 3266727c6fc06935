"""Every function that a step calls raises once, when it is called or when it returns.

After each fault the engine goes on, without the requests that the fault concerned, or it has failed as a whole.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

import treadle
from support.engines import TestEngine
from support.examples import share
from support.native import RUNNABLE, native_library
from support.tiny import make_prompts
from treadle import SamplingParams
from treadle.backends.cpu.model import NativeModel
from treadle.core.errors import EngineError
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.engine.observers import StatsLogger
from treadle.text.tokenizer import Tokenizer
from treadle.trace.recorder import StepRecorder
from treadle.trace.step_table import StepTableObserver

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="needs the native kernels")

SOURCE = str(Path(treadle.__file__).parent)
HARMLESS = ("backends", "runner", "text", "trace")
"""Rooms in which a fault never concerns more than the requests of its step."""
GUARDS = {("engine/engine.py", f"Engine.{name}") for name in ("step", "_check_works", "_show", "_remove_failed")} | {
    ("text/output_processor.py", f"OutputProcessor.{name}") for name in ("process", "collect", "take_failed", "_fail")
}
"""What handles faults cannot have any."""
NUM_BLOCKS = 14
NUM_SITES = 100
PROMPTS = make_prompts([9, 30, 12, 5, 21, 9, 12, 17])
DRAWN = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
PARAMS = [
    SamplingParams(**DRAWN, logprobs=2, prompt_logprobs=1),
    SamplingParams(**DRAWN, presence_penalty=0.5),
    SamplingParams(**DRAWN, stop=["nowhere to be found"]),
    SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-f ]+")),
    SamplingParams(**DRAWN, n=2),
    SamplingParams(**{**DRAWN, "temperature": 0.0}, n=2, use_beam_search=True),
    SamplingParams(**DRAWN, min_tokens=2, logit_bias={7: 1.0}, top_k=20),
    SamplingParams(temperature=0.0, max_tokens=6),
]
STREAMED = {0, 2, 4}


class Fault(Exception):  # noqa: N818
    """What is raised."""


class Tracer:
    """Counts the calls of each function of Treadle within steps, or raises in one of them.

    Args:
        site: (file, function, event, step, number of the call in it) where to raise; None to count.
    """

    def __init__(self, site=None):
        self.counts = {}
        self.site = site
        self.was_raised = False
        self.step = 0

    def begin_step(self):
        self.step += 1
        if self.site is None or self.site[3] == self.step:
            sys.settrace(self)

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        where = code.co_filename[len(SOURCE) + 1 :], code.co_qualname
        if self.site is not None and self.site[:2] != where:
            return None
        number = self.counts[*where, self.step] = self.counts.get((*where, self.step), 0) + 1
        if self.site is None or self.site[4] != number:
            return None
        if self.site[2] == "call":
            self._raise()
        return self._on_event

    def _on_event(self, frame, event, argument):
        if event == "return":
            self._raise()
        return self._on_event

    def _raise(self):
        self.was_raised = True
        raise Fault("injected")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """Runs the requests under a tracer; returns the engine, and what each request gave."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh")])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    loaded = replace(tiny.loaded, tokenizer=Tokenizer(backend))
    library = native_library()
    model = NativeModel(loaded.config, loaded.weights, library=library, weight_format="bfloat16", max_model_len=128)
    path = tmp_path_factory.mktemp("faults") / "run.jsonl"

    def run(tracer):
        engine = TestEngine(
            loaded, model, num_blocks=NUM_BLOCKS, block_size=8, num_host_blocks=10, threads=1, max_num_seqs=8,
            max_model_len=100, max_num_batched_tokens=24, admission_headroom=0,
        )  # fmt: skip
        scheduler, inner = engine.scheduler, engine.engine
        recorder = StepRecorder(path, scheduler.config, scheduler.cache_config, inner.clock)
        for observer in (
            recorder, StepTableObserver(NUM_BLOCKS, inner.clock), StatsLogger(inner.stats, inner.clock, 1e-9),
        ):  # fmt: skip
            inner.add_observer(observer)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add(str(i), prompt, params, stream=i in STREAMED, priority=i % 2)
        seen = {str(i): [] for i in range(len(PROMPTS))}
        while inner.has_unfinished_requests:
            try:
                tracer.begin_step()
                assert tracer.step < 500, "the engine does not come to an end"
                outputs = inner.step()
            finally:
                sys.settrace(None)
            for output in outputs:
                seen[output.request_id].append(output)
        recorder.close()
        return engine, seen

    return run


def answer(outputs):
    """All that a request gave, to the bit; whether it failed."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if outputs[-1].error is not None:
        assert "Fault('injected')" in outputs[-1].error
        assert "error" in {completion.finish_reason for completion in outputs[-1].outputs}
        return None
    parts = sorted(((c.index, n, c) for n, output in enumerate(outputs) for c in output.outputs), key=lambda p: p[:2])
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.cumulative_logprob, c.logprobs) for _, _, c in parts]


@pytest.fixture(scope="module")
def undisturbed(run):
    engine, seen = run(Tracer(("none", "none", "call", 0, 0)))
    assert {preemption.mode.value for preemption in engine.preemptions} == {"swap", "recompute"}
    return {name: answer(outputs) for name, outputs in seen.items()}


@pytest.fixture(scope="module")
def sites(run):
    counter = Tracer()
    run(counter)
    places = {}
    for (file, function, step), count in counter.counts.items():
        if (file, function) not in GUARDS:
            places.setdefault((file, function), []).append((step, count))
    assert len(places) > 300
    rng = random.Random(5)
    found = []
    for where, calls in sorted(places.items()):
        for event in ("call", "return"):
            step, count = rng.choice(calls)
            found.append((*where, event, step, rng.randint(1, count)))
    return rng.sample(found, share(NUM_SITES, at_least=20))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is dropped
def test_faults_everywhere(run, undisturbed, sites, caplog):
    caplog.set_level("CRITICAL", logger="treadle")
    num_failed_engines = 0
    for site in sites:
        tracer = Tracer(site)
        try:
            engine, seen = run(tracer)
        except EngineError as caught:
            error = str(caught)
        else:
            error = None
        if error is not None:
            assert "the engine has failed in step" in error, site
            assert "Fault('injected')" in error, site
            assert not site[0].startswith(HARMLESS), site
            num_failed_engines += 1
            continue
        assert tracer.was_raised, site
        kv = engine.scheduler.kv
        assert kv.num_available_blocks == NUM_BLOCKS, site
        assert not kv.host_tables, site
        for name, outputs in seen.items():
            got = answer(outputs)
            assert got is None or got == undisturbed[name], (site, name)
    assert 0 < num_failed_engines < len(sites)
