"""A process forked after a computation gets an error instead of hanging."""

import asyncio
import os
import signal
import subprocess
import sys
import warnings

import pytest

from support.tiny import make_model
from treadle import LLM, SamplingParams
from treadle.core.errors import EngineError
from treadle.engine.async_engine import AsyncEngine

OPTIONS = {"num_kv_blocks": 60, "max_num_seqs": 6, "swap_space": 0.0001, "log_stats_interval_s": 0, "num_threads": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=["auto", "off"])
def llm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model("tiny", folder)
    llm = LLM(str(folder), cpu_kernels=request.param, **OPTIONS)
    generate(llm)
    return llm


def generate(llm):
    return llm.generate([1, 2, 3], PARAMS, use_tqdm=False)


def error_in_a_child(action):
    """Run `action` in a forked process and return the text of its EngineError."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn about a fork with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        try:
            action()
            os.write(writer, b"no error")
        except EngineError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        message = file.read()
    os.waitpid(child, 0)
    return message


@pytest.mark.parametrize("action", ["generate", "stream", "by hand", "asyncio", "another LLM"])
def test_a_forked_child_gets_an_error_that_recommends_spawn(llm, action):
    stream = llm.stream([1, 2, 3], PARAMS)
    next(stream)
    actions = {
        "generate": lambda: generate(llm),
        "stream": lambda: next(stream),
        "by hand": lambda: llm.engine.add_request(None),
        "asyncio": lambda: asyncio.run(AsyncEngine(llm.engine).call(int)),
        "another LLM": lambda: LLM(llm.config.model, **OPTIONS),
    }
    assert 'start it with multiprocessing.get_context("spawn")' in error_in_a_child(actions[action])
    assert sum(len(output.outputs[0].token_ids) for output in stream) == 3  # the parent is not affected
    assert len(generate(llm)[0].outputs[0].token_ids) == 4


def test_a_child_forked_before_the_first_computation_can_compute(tmp_path):
    make_model("tiny", tmp_path)
    code = f"""
import os, signal
from treadle import LLM, SamplingParams
signal.alarm(100)
child = os.fork()
llm = LLM({str(tmp_path)!r}, **{OPTIONS})
llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
