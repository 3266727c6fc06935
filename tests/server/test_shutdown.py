"""Signals at the edges of a server's life, and requests that are still being prepared when it ends."""

import signal
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from server.conftest import PATIENCE_S, serving

pytestmark = pytest.mark.slow

# The signal arrives at a point that no test could hit from outside.
SERVE = """
import atexit, os, signal, sys, threading, time
from treadle.cli import main, serve
from treadle.server.http import HttpServer

number = getattr(signal, sys.argv[2])
run, freeze = HttpServer.run, serve._freeze_objects

def freeze_then_signal():
    freeze()
    os.kill(os.getpid(), number)

def run_then_signal(server):
    def stop_once_started():
        while not server.started:
            time.sleep(0.01)
        server.should_exit = True
    threading.Thread(target=stop_once_started).start()
    run(server)
    os.kill(os.getpid(), number)
    atexit.register(os.kill, os.getpid(), number)

if sys.argv[1] == "before":
    serve._freeze_objects = freeze_then_signal
else:
    HttpServer.run = run_then_signal
sys.exit(main.main(["serve", "--port", "0", "--quantization", "int8", "--kv-cache-memory", "64M"]))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_before_or_after_uvicorn_handles_them(when, number):
    done = subprocess.run(
        [sys.executable, "-c", SERVE, when, number], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert "Finished server process" in done.stderr
    assert "Traceback" not in done.stderr


def test_requests_that_are_being_prepared_end_with_an_error():
    """Their grammars are refused after 3 s each, one after the other, the last after half a minute."""
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(4000)]
    answers = []

    def ask(number):
        grammar = "\n".join(["root ::= r0", *rules, f'r4000 ::= "{number}"'])
        body = {"prompt": "Hello", "max_tokens": 4, "structured_outputs": {"grammar": grammar}}
        answers.append(httpx2.post(url + "/v1/completions", json=body, timeout=PATIENCE_S))

    log = []
    with serving("--kv-cache-memory", "64M", "--shutdown-grace", "0", log=log) as (process, url):
        asking = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in asking:
            thread.start()
        while not answers:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join()
        assert process.wait(timeout=PATIENCE_S) == 0
    errors = [answer.json()["error"]["message"] for answer in answers]
    assert "takes more than 3 s of CPU time" in errors[0]
    assert errors[-1] == "the server is shutting down"
    assert len([answer for answer in answers if answer.status_code == 503]) >= 8
    assert "Traceback" not in "".join(log)
