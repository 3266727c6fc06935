"""A process for untrusted work: its answers, its limits, and what replaces it."""

import json
import signal

import pytest

from treadle.core.limited_process import LimitedProcess, LimitExceeded, Limits, WorkFailed

LIMITS = Limits(cpu_s=5, wall_s=60.0, num_bytes=128 * 2**20, stack_bytes=2**20)

SCRIPT = f"""
import time
from treadle.core.limited_process import Limits, serve

kept = []

def work(asked):
    what, value = asked
    if what == "keep":
        kept.append(bytearray(value))
    elif what == "sleep":
        time.sleep(value)
    elif what == "repeat":
        return {{"text": "x" * value}}
    elif what == "set":
        return {{"text": {{1}}}}
    return {{"text": value}}

serve(lambda setup: work, {LIMITS!r})
"""


@pytest.fixture
def process(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    process = LimitedProcess(script, LIMITS)
    process.start(None)
    yield process
    if process.pid is not None:
        process._end()


def ask(process, what, value):
    return process.ask(json.dumps([what, value]))["text"]


def test_an_answer_that_cannot_be_written_is_a_failure_of_its_piece(process):
    pid = process.pid
    with pytest.raises(WorkFailed, match="not JSON serializable"):
        ask(process, "set", None)
    with pytest.raises(LimitExceeded, match="takes more than 128 MiB"):  # the text fits, but not with its JSON
        ask(process, "repeat", 100 * 2**20)
    assert ask(process, "say", "\ud800") == "\ud800"
    assert str(ask(process, "say", float("nan"))) == "nan"
    assert process.pid == pid


def test_an_interrupted_piece_leaves_no_answer_for_the_next(process):
    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            ask(process, "sleep", 30)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert process.pid is None
    process.start(None)
    assert ask(process, "say", "next") == "next"


def test_setup_that_cannot_be_written_starts_no_process(process):
    process._end()
    with pytest.raises(TypeError, match="not JSON serializable"):
        process.start({1})
    assert process.pid is None


def test_a_process_that_keeps_memory_is_replaced_and_refuses_no_piece(process):
    pids = []
    for _ in range(4):
        if process.pid is None:
            process.start(None)
        pids.append(process.pid)
        assert ask(process, "keep", 70 * 2**20) == 70 * 2**20
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_a_piece_has_its_memory_whatever_others_have_left(process):
    ask(process, "keep", 100 * 2**20)
    ask(process, "keep", 100 * 2**20)
    with pytest.raises(LimitExceeded, match="takes more than 128 MiB"):
        ask(process, "keep", 140 * 2**20)
