"""The metrics of requests whose clients have left."""

import asyncio
import time

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.conftest import PATIENCE_S, running

pytestmark = pytest.mark.slow

STEP_S = 0.02
MAX_TOKENS = 900  # far more than run before the server sees that a client has left


@pytest.fixture(scope="module")
def server():
    """Two seats, and slow steps."""
    with running(max_num_seqs=2) as server:
        execute = server.built.engine.runner.execute

        def slowly(plan):
            time.sleep(STEP_S)
            return execute(plan)

        server.built.engine.runner.execute = slowly
        yield server


def read(server):
    text = httpx2.get(server.url + "/metrics").text
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def num_ended(values):
    return sum(value for name, value in values.items() if name.startswith("vllm:request_success_total"))


async def ask(client, server, **body):
    """Request a long answer."""
    body = {"prompt": "One two three", "max_tokens": MAX_TOKENS, "ignore_eos": True, **body}
    if not body.get("stream"):
        await client.post(server.url + "/v1/completions", json=body)
        return
    async with client.stream("POST", server.url + "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            pass


async def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def leave(server, *, waiting, **body):
    """A client that leaves while its request waits, or after its first tokens."""
    scheduler, before = server.scheduler, num_ended(read(server))
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        blocker = None
        if waiting:
            blocker = asyncio.create_task(ask(client, server, n=2, temperature=1.0))
            await until(lambda: len(scheduler.batch) == 2)
        task = asyncio.create_task(ask(client, server, request_id="leaver", **body))
        if waiting:
            await until(lambda: len(scheduler.waiting) == 1)
        else:
            await until(lambda: any(seq.num_output_tokens > 2 for seq in running_sequences(scheduler)))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: num_ended(read(server)) > before)
        counted = read(server)
        if blocker is not None:
            blocker.cancel()
            await asyncio.wait([blocker])
    await asyncio.to_thread(server.wait_until_idle)
    return counted


def running_sequences(scheduler):
    return [seq for request in scheduler.batch.running_requests() for seq in request.sequences]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_leaves_is_counted(server, waiting, stream, n):
    before = read(server)
    after = asyncio.run(leave(server, waiting=waiting, stream=stream, n=n, temperature=1.0))

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("vllm:request_success_totalabort") == 1
    assert num_ended(after) - num_ended(before) == 1
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens",
                 "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"):  # fmt: skip
        assert grown(f"vllm:{name}_count") == 1, name
    assert grown("vllm:request_params_n_sum") == n
    assert grown("vllm:request_params_max_tokens_sum") == MAX_TOKENS
    assert grown("vllm:request_prompt_tokens_sum") == len(server.built.tokenizer.encode("One two three"))
    assert grown("vllm:e2e_request_latency_seconds_sum") > 0
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert grown(f"vllm:request_{name}_seconds_count") == (0 if waiting else 1), name
    num_tokens = grown("vllm:request_generation_tokens_sum")
    if waiting:
        assert num_tokens == 0
    else:
        assert num_tokens == grown("vllm:generation_tokens_total") > 0
        assert grown("vllm:request_max_num_generation_tokens_sum") == num_tokens / n
        assert grown("vllm:request_decode_time_seconds_sum") > 0
        assert grown("vllm:time_to_first_token_seconds_count") == 1
