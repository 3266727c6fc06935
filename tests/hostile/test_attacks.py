"""Hostile requests against a live server, with a neighbour that streams and a probe on /health."""

import json
import threading
import time

import httpx2
import pytest

from hostile.attacks import attacks
from server.conftest import PATIENCE_S, serving

pytestmark = pytest.mark.slow

NEIGHBOUR = {"prompt": "The loom and the", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CONTROL = {"prompt": "A treadle is", "max_tokens": 8, "temperature": 0.7, "seed": 5, "logprobs": 3}
MAX_GROWTH = 300 * 2**20
"""Of the server's memory over all attacks. A body of 8 MiB parses to ten times its size, and one leak of each would
exceed this."""


class Probe(threading.Thread):
    """Asks /health until `stop`; what went wrong."""

    def __init__(self, url):
        super().__init__()
        self._url = url
        self._is_stopping = threading.Event()
        self.count = 0
        self.errors = []

    def run(self):
        with httpx2.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._is_stopping.is_set():
                answer = client.get("/health")
                self.count += 1
                if answer.status_code != 200:
                    self.errors.append(answer.text)
                time.sleep(0.01)

    def stop(self):
        self._is_stopping.set()
        self.join()


def rss(process):
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def stream(client, body):
    """The pieces of a streamed text."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def wait_until_idle(client):
    """The state of the scheduler without a request."""
    deadline = time.monotonic() + PATIENCE_S
    while client.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline, "a request is left"
        time.sleep(0.005)
    return client.get("/scheduler/state").json()


def check(client, attack, alone, control):
    """Send one attack beside a stream; what it should not have changed, and did."""
    problems = []
    pieces = stream(client, NEIGHBOUR)
    text = next(pieces)
    headers = {"content-type": "application/json"}
    answer = client.post(attack.path, content=attack.content, headers=headers)
    body = answer.json()
    if answer.status_code != attack.status:
        problems.append(f"status {answer.status_code}: {answer.text[:300]}")
    if attack.status >= 400 and not body.get("error", {}).get("message"):
        problems.append(f"no message: {answer.text[:300]}")
    elif attack.field is not None and not str(body["error"]["param"]).startswith(attack.field):
        problems.append(f"the field is {body['error']['param']}: {body['error']['message']}")
    if len(answer.content) > 2**20 and attack.status >= 400:
        problems.append(f"an error of {len(answer.content)} bytes")
    if text + "".join(pieces) != alone:
        problems.append("the neighbour's text has changed")
    if client.post("/v1/completions", json=CONTROL).json()["choices"] != control:
        problems.append("the control request has another answer")
    state = wait_until_idle(client)
    if state["blocks"]["referenced"] or state["waiting"] or state["running"] or state["swapped"]:
        problems.append(f"something is left: {json.dumps(state)[:300]}")
    return [f"{attack.name}: {problem}" for problem in problems]


def test_no_request_harms_another():
    options = (
        "--kv-cache-memory",
        "128M",
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "32",
        "--log-stats-interval-s",
        "0",
    )
    with (
        serving(*options, log=(log := [])) as (process, url),
        httpx2.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        alone = "".join(stream(client, NEIGHBOUR))
        control = client.post("/v1/completions", json=CONTROL).json()["choices"]
        probe = Probe(url)
        probe.start()
        problems = []
        start = None
        for round_ in range(2):  # in the second, caches are full
            for attack in attacks():
                if round_ == 0 or len(attack.content) > 2**20:
                    problems += check(client, attack, alone, control)
            start = start or rss(process)
        probe.stop()
        assert rss(process) - start < MAX_GROWTH
        assert problems == []
        assert probe.errors == []
        assert probe.count > 10
    text = "".join(log)
    assert "Traceback" not in text
    assert "\nERROR b" not in text
