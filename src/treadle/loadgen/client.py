"""Sends a workload to a server as streams, and records when each chunk arrives."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from treadle.core.errors import UsageError
from treadle.loadgen.workload import ENDPOINTS, Job

_WORDS = (
    "sea", "boat", "wind", "stone", "river", "night", "light", "house", "road", "song", "tree", "cloud", "bird",
    "fire", "glass", "bread", "snow", "field", "star", "rain",
)  # fmt: skip


@dataclass(slots=True)
class Result:
    """The outcome of one job. Times are seconds after the start of the run.

    Attributes:
        sent: when the request was sent.
        late: how long after its due time it was sent; 0 in a closed loop.
        tokens_at: when each chunk with new tokens arrived.
        ended: when its stream ended or failed.
        prompt_tokens, cached_tokens, output_tokens: counts reported by the server.
        error: why it failed; None on success.
    """

    sent: float
    late: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first chunk."""
        return self.tokens_at[0] - self.sent

    @property
    def e2e(self) -> float:
        """Time from sending to the end of the stream."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.tokens_at[-1] - self.tokens_at[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: times between chunks."""
        return [after - before for before, after in pairwise(self.tokens_at)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server to send to, and how to send.

    Attributes:
        base_url: URL of the server, without /v1.
        model: name of the model on the server.
        endpoint: "completions" (prompts as token ids) or "chat" (as many words).
        api_key: sent as a header; None for none.
        ignore_eos: whether to request the full output length.
        extra: additional fields of every request.
    """

    base_url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return _headers(self.api_key)

    def body(self, job: Job) -> dict[str, Any]:
        """The request body for a job."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        if self.endpoint == "chat":
            text = " ".join(_WORDS[token_id % len(_WORDS)] for token_id in job.prompt)
            return {**body, "messages": [{"role": "user", "content": text}]}
        return {**body, "prompt": list(job.prompt)}


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def describe_server(base_url: str, api_key: str | None) -> tuple[str, int | None]:
    """The name of the first model of a server, and its maximum length, or None if the server does not report it.

    Raises:
        UsageError: the server cannot be reached or lists no model.
    """
    url = f"{base_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
            session.get(url, headers=_headers(api_key)) as answer,
        ):
            models = (await answer.json(content_type=None))["data"] if answer.status == 200 else []
            first: dict[str, Any] = models[0] if models else {}
            message = "" if models else await _message(answer)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise UsageError("--base-url", f"no server that speaks OpenAI's API at {base_url} ({error!r})") from error
    if "id" not in first:
        raise UsageError("--base-url", f"{url} lists no model ({answer.status} {message})")
    return first["id"], first.get("max_model_len")


async def run(
    target: Target, jobs: Sequence[Job], *, concurrency: int | None, on_end: Callable[[Result], None]
) -> None:
    """Send all jobs: at their times, or `concurrency` at once.

    Args:
        target: the server.
        jobs: in order of their times.
        concurrency: number of requests in flight, in a closed loop; None for an open loop, which sends each job at
            its time.
        on_end: called with every result as it arrives, including failures.
    """
    start = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)  # no limit on connections
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)  # no limit on the duration of an answer
    async with aiohttp.ClientSession(
        target.base_url, headers=target.headers, connector=connector, timeout=timeout
    ) as session:

        async def one(job: Job) -> None:
            on_end(await _send(session, target, job, start))

        async with asyncio.TaskGroup() as tasks:
            if concurrency is None:
                for job in jobs:
                    due = job.at or 0.0
                    await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                    tasks.create_task(one(job))
            else:
                waiting = iter(jobs)

                async def worker() -> None:
                    for job in waiting:
                        await one(job)

                for _ in range(min(concurrency, len(jobs))):
                    tasks.create_task(worker())


async def _send(session: aiohttp.ClientSession, target: Target, job: Job, start: float) -> Result:
    now = time.perf_counter
    result = Result(sent=now() - start)
    if job.at is not None:
        result.late = max(0.0, result.sent - job.at)
    try:
        async with session.post(ENDPOINTS[target.endpoint], json=target.body(job)) as answer:
            if answer.status != 200:
                result.error = f"{answer.status} {await _message(answer)}"
            else:
                await _read(answer, result, lambda: now() - start)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = now() - start
    if result.error is None and not result.tokens_at:
        result.error = "no token arrived"
    return result


async def _read(answer: aiohttp.ClientResponse, result: Result, now: Callable[[], float]) -> None:
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        at = now()
        chunk = json.loads(line[6:])
        if "error" in chunk:
            result.error = f"in the stream: {chunk['error'].get('message')}"
            return
        usage = chunk.get("usage")
        if usage is not None:
            result.prompt_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk["choices"]:
            # A chat stream starts with a chunk that only holds the role.
            if "role" not in choice.get("delta", {}):
                result.tokens_at.append(at)


async def _message(answer: aiohttp.ClientResponse) -> str:
    text = await answer.text(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return str(text)[:200]
