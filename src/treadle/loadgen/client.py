"""Sends a workload to a server as streams, and records when each chunk arrives."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import aiohttp

from treadle.core.errors import TreadleError
from treadle.loadgen.workload import ENDPOINTS, Job

_WORDS = (
    "sea", "boat", "wind", "stone", "river", "night", "light", "house", "road", "song", "tree", "cloud", "bird",
    "fire", "glass", "bread", "snow", "field", "star", "rain",
)  # fmt: skip

_LAST_EVENT = b"[DONE]"

MAX_ERROR_LENGTH = 200
"""Characters of an error message that are kept."""


class ServerError(TreadleError, RuntimeError):
    """There is no server to send to, or it does not speak OpenAI's API."""


class Failure(StrEnum):
    """The kinds of failure of a request; an HTTP error is a kind of its own per status, such as "HTTP 503"."""

    NOT_CONNECTED = "no connection"
    NO_ANSWER = "connection closed before an answer"
    CUT = "stream cut before its end"
    IN_STREAM = "error in the stream"
    INVALID = "invalid answer"
    NO_TEXT = "no text"
    TIMEOUT = "timeout"


@dataclass(slots=True)
class Result:
    """The outcome of one job. Times are seconds after the start of the run.

    Attributes:
        sent: when the request was sent.
        late: how long after its due time it was sent; 0 in a closed loop.
        tokens_at: when each chunk with text arrived.
        ended: when its stream ended or failed.
        has_usage: whether the server reported token counts.
        prompt_tokens, cached_tokens, output_tokens: counts reported by the server. Without them, the output tokens
            are the chunks with text, and the others are 0.
        failure: the kind of failure; None on success.
        error: what went wrong, in words; None on success.
    """

    sent: float
    late: float = 0.0
    tokens_at: list[float] = field(default_factory=list)
    ended: float = 0.0
    has_usage: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    error: str | None = None

    def fail(self, kind: str, error: object) -> None:
        """Mark the request as failed."""
        self.failure, self.error = kind, _short(error)

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first chunk with text."""
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
        """Inter-token latencies: times between chunks with text."""
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
        ServerError: the server cannot be reached or lists no model.
    """
    url = f"{base_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
            session.get(url, headers=_headers(api_key)) as answer,
        ):
            text = await answer.text(errors="replace")
    except aiohttp.ClientConnectorError as error:
        raise ServerError(f"no server listens at {base_url} ({_reason(error)})") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ServerError(f"{url} gave no answer ({error or type(error).__name__})") from error
    models = _object(_parsed(text)).get("data") if answer.status == 200 else None
    first = _object(models[0]) if isinstance(models, list) and models else {}
    name, max_len = first.get("id"), first.get("max_model_len")
    if not isinstance(name, str):
        raise ServerError(f"{url} lists no model (status {answer.status}: {_short(_message(text))})")
    return name, max_len if isinstance(max_len, int) else None


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
    reader = None
    try:
        async with session.post(ENDPOINTS[target.endpoint], json=target.body(job)) as answer:
            if answer.status != 200:
                result.fail(f"HTTP {answer.status}", _message(await _text(answer)))
            elif answer.content_type == "application/json":
                result.fail(Failure.INVALID, f"not a stream: {_message(await _text(answer))}")
            else:
                reader = _StreamReader(result, lambda: now() - start)
                await reader.read(answer.content)
    except TimeoutError as error:
        result.fail(Failure.TIMEOUT, error or "the server took too long")
    except aiohttp.ClientConnectorError as error:
        result.fail(Failure.NOT_CONNECTED, _reason(error))
    except (aiohttp.ClientError, OSError) as error:
        if reader is None:
            result.fail(Failure.NO_ANSWER, error)
        # Otherwise the stream was cut, unless its last event had come.
    except ValueError as error:
        result.fail(Failure.INVALID, error)
    result.ended = now() - start
    if reader is not None:
        reader.close()
    return result


class _StreamReader:
    """Reads one stream of chunks into a result.

    Servers differ: some leave out `delta`, `choices`, `usage`, the last event or the space after `data:`, or send
    them as null.
    """

    def __init__(self, result: Result, now: Callable[[], float]) -> None:
        self._result = result
        self._now = now
        self._is_complete = False

    async def read(self, content: aiohttp.StreamReader) -> None:
        """Read to the end of the stream, or to an error in it."""
        async for event in _events(content):
            if event == _LAST_EVENT:
                self._is_complete = True
                continue
            chunk = _parsed(event)
            if not isinstance(chunk, dict):
                raise ValueError(f"a chunk that is no JSON object: {event[:80].decode(errors='replace')}")
            error = _error_of(chunk)
            if error is not None:
                self._result.fail(Failure.IN_STREAM, error)
                return
            self._take(chunk)

    def close(self) -> None:
        """Judge the stream, after its end."""
        result = self._result
        if not result.has_usage:
            result.output_tokens = len(result.tokens_at)
        if result.failure is not None:
            return
        if not self._is_complete:
            result.fail(Failure.CUT, f"chunks with text: {len(result.tokens_at)}")
        elif not result.tokens_at:
            result.fail(Failure.NO_TEXT, "the stream ended without text")

    def _take(self, chunk: dict[str, Any]) -> None:
        result = self._result
        usage = _object(chunk.get("usage"))
        if isinstance(usage.get("completion_tokens"), int):
            result.has_usage = True
            result.output_tokens = usage["completion_tokens"]
            result.prompt_tokens = _count(usage.get("prompt_tokens"))
            result.cached_tokens = _count(_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
        choices = chunk.get("choices")
        for choice in map(_object, choices if isinstance(choices, list) else ()):
            if _has_text(choice):
                result.tokens_at.append(self._now())
            if choice.get("finish_reason") is not None:
                self._is_complete = True


def _has_text(choice: dict[str, Any]) -> bool:
    delta = _object(choice.get("delta"))
    # Servers send the thoughts of a reasoning model under one of two names.
    return bool(
        choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments, names and ids of events are left out."""
    rest, data = b"", []
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif not line and data:
                yield b"\n".join(data)
                data.clear()
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    # The end of a stream may lack its empty line. What is not whole is the sign of a cut.
    last = b"\n".join(data)
    if last == _LAST_EVENT or _parsed(last) is not None:
        yield last


def _parsed(text: str | bytes) -> Any:
    """The JSON value of a text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _short(error: object) -> str:
    """An error message as one line, cut to MAX_ERROR_LENGTH."""
    return " ".join(str(error).split())[:MAX_ERROR_LENGTH]


def _reason(error: aiohttp.ClientConnectorError) -> str:
    """Why a connection failed, in the system's words."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else str(error.strerror or error)


def _error_of(body: Any) -> str | None:
    """The error in a body, whether an object or a text; None if there is none."""
    body = _object(body)
    error = body if body.get("object") == "error" else body.get("error")
    if isinstance(error, dict) and error.get("message"):
        error = error["message"]
    return str(error) if error else None


async def _text(answer: aiohttp.ClientResponse) -> str:
    """The body of an answer that is no stream; empty if it is cut."""
    try:
        return await answer.text(errors="replace")
    except (aiohttp.ClientError, OSError):
        return ""


def _message(text: str) -> str:
    """What the body of a failed request says; the body itself if that is in no known form."""
    body = _parsed(text)
    return _error_of(body) or str(_object(body).get("detail") or text.strip() or "no text in the answer")
