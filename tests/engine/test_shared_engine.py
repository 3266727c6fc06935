"""Overlapping calls of one LLM, in one thread or many: each gets its own outputs, as if it ran alone."""

import ctypes
import gc
import threading
import time

import pytest

from support.tiny import make_model, make_prompts
from treadle import LLM, SamplingParams
from treadle.core.errors import EngineError, InvalidRequestError, Overloaded
from treadle.engine.shared_engine import _FairLock

PROMPTS = make_prompts([5, 30, 12, 21, 9, 40, 17, 3])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model("tiny", folder)
    return LLM(
        str(folder),
        num_kv_blocks=60,
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        swap_space=0.0001,
        max_num_queued_requests=40,
        log_stats_interval_s=0,
        check_invariants=True,
    )


@pytest.fixture(autouse=True)
def _nothing_stays(llm):
    yield
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.scheduler.kv.num_available_blocks == 60


@pytest.fixture(scope="module")
def alone(llm):
    """The output of each prompt when it runs alone, sampled with its own seed."""
    return [bits(llm.generate(prompt, params(i), use_tqdm=False)[0]) for i, prompt in enumerate(PROMPTS)]


def params(i, max_tokens=20):
    return SamplingParams(temperature=1.0, seed=i, max_tokens=max_tokens + i, ignore_eos=True, logprobs=2)


def bits(*outputs):
    """Return the tokens, text and log-probabilities of one request, from all its outputs."""
    parts = [output.outputs[0] for output in outputs]
    assert len({output.request_id for output in outputs}) == 1
    assert [output.finished for output in outputs] == [False] * (len(parts) - 1) + [True]
    logprobs = [(i, entry.logprob) for part in parts for position in part.logprobs for i, entry in position.items()]
    return [i for part in parts for i in part.token_ids], "".join(part.text for part in parts), logprobs


def test_generate_while_a_stream_is_open(llm, alone):
    seen = []
    for output in llm.stream(PROMPTS[0], params(0)):
        seen.append(output)
        if len(seen) in (1, 4):
            inner = llm.generate(PROMPTS[1:4], [params(i) for i in (1, 2, 3)], use_tqdm=False)
            assert [bits(o) for o in inner] == alone[1:4]
    assert bits(*seen) == alone[0]


def test_streams_that_are_read_alternately(llm, alone):
    streams = {i: llm.stream(PROMPTS[i], params(i)) for i in range(5)}
    seen = {i: [] for i in streams}
    while streams:
        for i, stream in list(streams.items()):
            output = next(stream, None)
            if output is None:
                del streams[i]
            else:
                seen[i].append(output)
    assert [bits(*seen[i]) for i in range(5)] == alone[:5]


def test_a_stream_that_is_read_late_loses_no_output(llm, alone):
    stream = llm.stream(PROMPTS[4], params(4))
    first = next(stream)
    llm.generate(PROMPTS[:3], params(5, max_tokens=60), use_tqdm=False)
    before = llm.engine.num_steps
    assert bits(first, *stream) == alone[4]
    assert llm.engine.num_steps == before  # all of its outputs were queued already


def test_calls_from_many_threads(llm, alone):
    results, errors = {}, []
    start = threading.Barrier(8)

    def work(name):
        try:
            start.wait()
            for i in range(name, name + 4):
                i %= len(PROMPTS)
                if (name + i) % 2:
                    got = bits(*llm.stream(PROMPTS[i], params(i)))
                else:
                    got = bits(*llm.generate([PROMPTS[i]], params(i), use_tqdm=False))
                results[name, i] = got
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert len(results) == 32
    for (_, i), got in results.items():
        assert got == alone[i]


def test_no_thread_starves(llm):
    """A short call gets its turn while a long one steps in another thread."""
    is_long_done = threading.Event()
    is_running = threading.Event()

    def long_call():
        for _ in llm.stream(PROMPTS[0], params(0, max_tokens=400)):
            is_running.set()
        is_long_done.set()

    thread = threading.Thread(target=long_call)
    thread.start()
    assert is_running.wait(60)
    llm.generate(PROMPTS[1], params(1, max_tokens=2), use_tqdm=False)
    assert not is_long_done.is_set()
    thread.join(120)
    assert is_long_done.is_set()


def test_request_ids_are_unique_across_calls(llm):
    names = []
    with pytest.raises(InvalidRequestError):
        llm.generate([[5], []], params(0), use_tqdm=False)
    for output in llm.stream([PROMPTS[0], PROMPTS[1]], params(0, max_tokens=2)):
        inner = llm.generate(PROMPTS[2:4], params(0, max_tokens=1), use_tqdm=False)
        names += [o.request_id for o in inner] + [output.request_id] * output.finished
    assert len(set(names)) == len(names)


def test_a_dropped_stream_frees_its_blocks_and_affects_no_other(llm, alone):
    kept, dropped = llm.stream(PROMPTS[1], params(1)), llm.stream(PROMPTS[5:8], params(0, max_tokens=80))
    seen = [next(kept)]
    next(dropped)
    assert llm.engine.scheduler.num_unfinished_requests == 4
    del dropped
    gc.collect()
    assert llm.engine.scheduler.num_unfinished_requests == 1
    assert bits(*seen, *kept) == alone[1]


def test_a_stream_dropped_during_a_step_ends_after_the_step(llm, alone, monkeypatch):
    """The thread that executes the step closes the stream, as the garbage collector may do."""
    dropped = llm.stream(PROMPTS[2], params(2, max_tokens=80))
    next(dropped)
    execute = llm.engine.runner.execute

    unfinished = []

    def close_within_the_step(plan):
        dropped.close()
        unfinished.append(llm.engine.scheduler.num_unfinished_requests)
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", close_within_the_step)
    assert bits(*llm.stream(PROMPTS[1], params(1))) == alone[1]
    assert unfinished[:2] == [2, 1]


def test_an_error_in_one_call_affects_no_other(llm, alone):
    stream = llm.stream(PROMPTS[3], params(3))
    seen = [next(stream)]
    with pytest.raises(Overloaded):
        llm.generate(PROMPTS[:1] * 60, params(0), use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.generate([10**6], params(0), use_tqdm=False)

    def fail_while_reading():
        for _ in llm.stream(PROMPTS[0], params(0)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_reading()
    gc.collect()
    assert llm.engine.scheduler.num_unfinished_requests == 1
    assert bits(*seen, *stream) == alone[3]


def test_a_call_from_within_a_step_is_refused_instead_of_deadlocking(llm, monkeypatch):
    execute = llm.engine.runner.execute
    errors = []

    def call_within_the_step(plan):
        try:
            llm.generate(PROMPTS[1], params(1), use_tqdm=False)
        except EngineError as error:
            errors.append(str(error))
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", call_within_the_step)
    llm.generate(PROMPTS[0], params(0, max_tokens=2), use_tqdm=False)
    assert len(errors) >= 2
    assert "a step of this engine is running in this thread" in errors[0]


def test_an_interrupted_wait_passes_the_lock_to_the_next_thread():
    lock = _FairLock()
    lock.acquire()
    order = []

    def wait_in_turn(name):
        lock.acquire()
        order.append(name)
        lock.release()

    class Broken(threading.Thread):
        def run(self):
            try:
                wait_in_turn("broken")
            except KeyboardInterrupt:
                order.append("interrupted")

    def wait_for(count):
        while len(lock._waiting) != count:
            time.sleep(0.001)

    threads = [threading.Thread(target=wait_in_turn, args=("first",)), Broken()]
    for i, thread in enumerate(threads):
        thread.start()
        wait_for(i + 1)
    # The interrupt arrives as soon as the thread wakes up, when it is its turn.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[1].ident), ctypes.py_object(KeyboardInterrupt))
    last = threading.Thread(target=wait_in_turn, args=("last",))
    last.start()
    wait_for(3)
    assert not lock.acquire(wait=False)
    lock.release()
    for thread in [*threads, last]:
        thread.join(20)
    assert order == ["first", "interrupted", "last"]
    assert lock.acquire(wait=False)


def test_a_fault_of_the_scheduler_ends_every_call(tmp_path, monkeypatch):
    make_model("tiny", tmp_path)
    llm = LLM(str(tmp_path), num_kv_blocks=60, log_stats_interval_s=0)

    def fail():
        raise ValueError("it is broken")

    streams = [llm.stream(prompt, params(0)) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", fail)
    message = r"the engine has failed in step .*: ValueError\('it is broken'\)"
    with pytest.raises(EngineError, match=message):
        llm.generate(PROMPTS[2], params(0), use_tqdm=False)
    monkeypatch.undo()
    for stream in streams:
        with pytest.raises(EngineError, match=message):
            list(stream)
    with pytest.raises(EngineError, match=message):
        llm.generate(PROMPTS[2], params(0), use_tqdm=False)
