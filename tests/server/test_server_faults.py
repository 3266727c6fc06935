"""Faults around a server: disconnecting clients, bad bodies, overload, a failing runner, a dead engine."""

import asyncio
import resource
import signal
import threading
from collections import Counter

import aiohttp
import httpx2
import pytest
import uvloop

from server.conftest import PATIENCE_S, running, serving

pytestmark = pytest.mark.slow


class Gate:
    """Holds the engine before each step until the test releases it, so that the test can inspect the scheduler.

    Args:
        runner: whose steps are held.
    """

    def __init__(self, runner):
        self._execute = runner.execute
        self._steps = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._is_open = False
        runner.execute = self._hold

    def _hold(self, plan):
        if not self._is_open:
            self._arrived.release()
            self._steps.acquire()
        return self._execute(plan)

    def wait(self):
        """Wait until a step is planned."""
        assert self._arrived.acquire(timeout=PATIENCE_S)

    def step(self):
        """Let the planned step run."""
        self._steps.release()

    def open(self):
        """Stop holding the engine."""
        self._is_open = True
        self._steps.release()


async def _ask(client, url, name, i):
    """Request a long answer, streamed or not."""
    prompt = [(7 * i + j) % 5000 + 5 for j in range(20 + 7 * i % 200)]
    body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "request_id": name}
    if i % 2:
        async with client.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                pass
    else:
        await client.post(url + "/v1/completions", json=body)


def _places(scheduler):
    """Unfinished requests by state: waiting, in prefill (partly computed), decoding, swapped."""
    running = scheduler.batch.running_requests()
    decoding = [r for r in running if r.is_forked]
    return {
        "waiting": [r.request_id for r in scheduler.waiting],
        "prefill": [r.request_id for r in running if r not in decoding and r.sequences[0].num_computed_tokens],
        "decode": [r.request_id for r in decoding],
        "swapped": [r.request_id for r in scheduler.swapped],
    }


async def _leave_everywhere(server, gate):
    """60 clients send requests; three each of the waiting, prefilling, decoding and swapped disconnect, then all."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:
        tasks = {
            f"cmpl-leaver-{i}": asyncio.create_task(_ask(client, server.url, f"leaver-{i}", i)) for i in range(60)
        }
        left = Counter()
        while any(left[place] < 3 for place in ("waiting", "prefill", "decode", "swapped")):
            await asyncio.to_thread(gate.wait)
            for place, names in _places(server.scheduler).items():
                name = next((name for name in names if not tasks[name].done()), None)
                if name is not None and left[place] < 3:
                    tasks[name].cancel()
                    await asyncio.wait([tasks[name]])
                    left[place] += 1
            gate.step()
        gate.open()
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def test_clients_that_leave():
    """Clients disconnect while waiting, in prefill, in decode and swapped; the small pool forces swaps."""
    with running(
        num_kv_blocks=60, max_model_len=600, preemption_mode="swap", swap_space=0.1, admission_headroom=0,
        max_num_batched_tokens=32,
    ) as server:  # fmt: skip
        asyncio.run(_leave_everywhere(server, Gate(server.built.engine.runner)))
        server.wait_until_idle()
        assert server.post("/v1/completions", {"prompt": "Still here", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe\x00", 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[]", 400),
        (b"", 400),
        (b'{"prompt": {"a": 1}}', 400),
        (b'{"prompt": "x", "max_tokens": "many"}', 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413),
    ],
)
def test_bad_bodies(server, content, status):
    headers = {"content-type": "application/json"}
    answer = httpx2.post(server.url + "/v1/completions", content=content, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    announced = httpx2.post(
        server.url + "/v1/completions", content=(content[i : i + 65536] for i in range(0, len(content), 65536)),
        headers=headers, timeout=PATIENCE_S,
    )  # fmt: skip
    assert announced.status_code == status
    assert httpx2.get(server.url + "/nowhere").status_code == 404


@pytest.mark.parametrize("limit", [None, 500])
def test_ten_thousand_at_once(limit):
    """Without a limit on the queue all are answered; with one, the excess gets 503, and no request is lost."""
    options = ["--max-num-queued-requests", str(limit)] if limit else []
    count = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * count) if hard > 0 else 2 * count, hard))

    async def flood(url):
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=4 * PATIENCE_S)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

            async def one(i):
                body = {"prompt": [100 + i % 7], "max_tokens": 1, "ignore_eos": True, "temperature": 0}
                async with session.post("/v1/completions", json=body) as answer:
                    return answer.status, answer.headers.get("retry-after"), await answer.json()

            return await asyncio.gather(*(one(i) for i in range(count)))

    with serving("--kv-cache-memory", "64M", *options) as (_, url):
        answers = uvloop.run(flood(url))
        assert len(answers) == count
        texts = {}
        for i, (status, retry_after, body) in enumerate(answers):
            if status == 200:
                assert body["usage"]["completion_tokens"] == 1
                texts.setdefault(i % 7, set()).add(body["choices"][0]["text"])
            else:
                assert (status, retry_after) == (503, "1")
                assert "the queue is full" in body["error"]["message"]
        assert all(len(same) == 1 for same in texts.values())
        num_good = sum(status == 200 for status, _, _ in answers)
        assert num_good == count if limit is None else 500 <= num_good < count
        assert httpx2.get(url + "/load").json() == {"server_load": 0}
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_step_that_fails_fails_its_requests_only():
    with running(max_num_seqs=2) as server:
        runner = server.built.engine.runner
        execute = runner.execute
        failing = iter([False, False, True])

        def broken(plan):
            if next(failing, False):
                raise RuntimeError("a broken wire")
            return execute(plan)

        runner.execute = broken
        body = {"prompt": "Hello", "max_tokens": 6, "ignore_eos": True}
        failed = server.post("/v1/completions", body)
        assert failed.status_code == 500
        assert "a broken wire" in failed.json()["error"]["message"]
        assert server.post("/v1/completions", body).status_code == 200
        assert httpx2.get(server.url + "/health").status_code == 200


def test_a_dead_engine():
    with running() as server:
        scheduler = server.scheduler

        def die():
            raise RuntimeError("no way to go on")

        scheduler.schedule = die
        body = {"prompt": "Hi", "stream": True}
        with (
            httpx2.stream("GET", server.url + "/scheduler/steps", timeout=PATIENCE_S) as steps,
            httpx2.stream("POST", server.url + "/v1/completions", json=body) as answer,
        ):
            lines = [line for line in answer.iter_lines() if line]
            assert [line[:8] for line in steps.iter_lines() if line.startswith("data")] == [
                'data: {"'
            ]  # the state, and its end
        assert "no way to go on" in lines[0]
        assert lines[-1] == "data: [DONE]"
        answer = server.post("/v1/completions", {"prompt": "Hello"})
        assert answer.status_code == 503
        assert "no way to go on" in answer.json()["error"]["message"]
        assert httpx2.get(server.url + "/health").status_code == 503
        assert httpx2.get(server.url + "/scheduler/steps").status_code == 503
        assert server.post("/v1/completions", {"prompt": "Hello"}).status_code == 503


def test_the_key():
    with running(app_options={"api_key": "s3cret"}) as server:
        body = {"prompt": "Hello", "max_tokens": 1}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            answer = server.post("/v1/completions", body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/metrics", "/v1/models", "/version", "/docs"):
            assert httpx2.get(server.url + path).status_code == 401
        assert httpx2.get(server.url + "/health").status_code == 200
        assert server.post("/v1/completions", body, headers={"authorization": "Bearer s3cret"}).status_code == 200


def test_metrics(server):
    from prometheus_client.parser import text_string_to_metric_families

    def read():
        text = httpx2.get(server.url + "/metrics").text
        return {s.name + str(s.labels.get("finished_reason", "")): s.value
                for family in text_string_to_metric_families(text) for s in family.samples
                if not s.name.endswith("_bucket")}  # fmt: skip

    before = read()
    answer = server.post("/v1/completions", {"prompt": "One two", "max_tokens": 5, "ignore_eos": True}).json()
    server.wait_until_idle()
    after = read()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("vllm:generation_tokens_total") == 5
    assert grown("vllm:request_success_totallength") == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 4
    assert grown("vllm:request_prompt_tokens_sum") == answer["usage"]["prompt_tokens"]
    parts = [grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")]
    assert all(part > 0 for part in parts)
    assert parts[1] + parts[2] == pytest.approx(parts[3])
    assert parts[0] + parts[3] <= grown("vllm:e2e_request_latency_seconds_sum") + 1e-6
    assert grown("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(parts[2] / 4)
    assert grown("vllm:request_params_max_tokens_sum") == 5
    assert after["vllm:cache_config_info"] == 1
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("with_request", [False, True])
def test_sigterm(with_request):
    with serving("--kv-cache-memory", "64M", "--shutdown-grace", "600") as (process, url):
        assert httpx2.get(url + "/health").status_code == 200
        if with_request:
            body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
            with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
                events = answer.iter_lines()
                next(events)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in events if line]
            assert rest[-1] == "data: [DONE]"
            assert '"length"' in rest[-2]
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 0  # far less than the grace


def test_a_watcher_does_not_hold_up_the_end():
    with serving("--kv-cache-memory", "64M") as (process, url):
        with httpx2.stream("GET", url + "/scheduler/steps", timeout=PATIENCE_S) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            list(events)
        assert process.wait(timeout=PATIENCE_S) == 0
