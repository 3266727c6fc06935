"""What goes wrong around a server: clients that leave, bad bodies, overload, a failing runner, a dying engine."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import httpx2
import pytest

from server.conftest import running

pytestmark = pytest.mark.slow


async def _leave(client, url, i):
    """Start a request and close the connection at some point: waiting, in prefill, decoding."""
    body = {"prompt": [(7 * i + j) % 5000 + 5 for j in range(20 + i % 200)], "max_tokens": 200, "ignore_eos": True}
    try:
        if i % 2:
            body["stream"] = True
            async with client.stream("POST", url + "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    if i % 3 == 0:
                        break
                    await asyncio.sleep(0.01 * (i % 7))
                    break
        else:
            await client.post(url + "/v1/completions", json=body, timeout=0.05 * (i % 9) + 0.01)
    except httpx2.TimeoutException:
        pass


def test_clients_that_leave(server):
    async def rounds():
        limits = httpx2.Limits(max_connections=None)
        for _ in range(5):
            async with httpx2.AsyncClient(limits=limits, timeout=60) as client:
                await asyncio.gather(*(_leave(client, server.url, i) for i in range(200)))

    asyncio.run(rounds())
    server.wait_until_idle(timeout=60)
    assert server.post("/v1/completions", {"prompt": "Still here", "max_tokens": 2}).status_code == 200


def test_clients_that_leave_while_swapped():
    with running(num_kv_blocks=40, preemption_mode="swap", swap_space=0.1, admission_headroom=0) as server:

        async def leave():
            async with httpx2.AsyncClient(timeout=60) as client:
                await asyncio.gather(*(_leave(client, server.url, i) for i in range(60)))

        asyncio.run(leave())
        server.wait_until_idle(timeout=60)


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
    answer = httpx2.post(server.url + "/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    announced = httpx2.post(
        server.url + "/v1/completions", content=(content[i : i + 65536] for i in range(0, len(content), 65536)),
        headers=headers, timeout=60,
    )  # fmt: skip
    assert announced.status_code == status
    assert httpx2.get(server.url + "/nowhere").status_code == 404


def test_overload():
    with running(max_num_queued_requests=5, max_num_seqs=2) as server:

        async def flood():
            body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(timeout=120, limits=limits) as client:
                return await asyncio.gather(
                    *(client.post(server.url + "/v1/completions", json=body) for _ in range(300))
                )

        answers = asyncio.run(flood())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}
        for answer in answers:
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
                assert "the queue is full" in answer.json()["error"]["message"]
            else:
                assert answer.json()["usage"]["completion_tokens"] == 3
        server.wait_until_idle()


def test_a_step_that_fails_fails_its_requests_only():
    with running(max_num_seqs=2) as server:
        runner = server.built.engine._runner
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
        with httpx2.stream("POST", server.url + "/v1/completions", json={"prompt": "Hi", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert "no way to go on" in lines[0]
        assert lines[-1] == "data: [DONE]"
        answer = server.post("/v1/completions", {"prompt": "Hello"})
        assert answer.status_code == 503
        assert "no way to go on" in answer.json()["error"]["message"]
        assert httpx2.get(server.url + "/health").status_code == 503
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
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("with_request", [False, True])
def test_sigterm(with_request):
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "serve", "--port", "0", "--quantization", "int8", "--kv-cache-memory", "64M",
         "--shutdown-grace", "20"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"running on (http://\S+)", line)
            if found:
                break
        else:
            pytest.fail("".join(lines))
        url = found[1]
        assert httpx2.get(url + "/health").status_code == 200
        if with_request:
            body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
            with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
                events = answer.iter_lines()
                next(events)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in events if line]
            assert rest[-1] == "data: [DONE]"
            assert '"length"' in rest[-2]
        else:
            process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(timeout=25) == 0
        assert time.monotonic() - start < 15
    finally:
        process.kill()
        process.stderr.close()
