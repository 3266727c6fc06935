"""The load of soak.py: random jobs, the clients that send them, and the account of what came back."""

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE_S = 300.0
"""Time in which a request must end; a busy machine takes a part of it."""

WORDS = ["sea", "boat", "wind", "stone", "river", "night", "light", "house", "road", "song", "tree", "cloud", "snow"]
PREFIXES = [" ".join(random.Random(i).choices(WORDS, k=40 * (i + 1))) + ". " for i in range(4)]
"""Shared by prompts: 40 to 160 words."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["name", "warm"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "blue and yellow"]
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
LARK = 'start: "I like " ("tea" | "coffee" | "rain")'
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json"),
    ({"response_format": {"type": "json_object"}}, "json"),
    ({"structured_outputs": {"regex": DATE}}, DATE),
    ({"structured_outputs": {"choice": COLOURS}}, "|".join(COLOURS)),
    ({"structured_outputs": {"grammar": LARK}}, "I like (tea|coffee|rain)"),
]
"""Constraints, and what a whole answer is: JSON, or a match of the expression."""


@dataclass(frozen=True)
class Job:
    """A request, and when its client leaves.

    Attributes:
        kind: for the table.
        path, body: of the request.
        form: "json" or a regular expression that every choice matches that was not cut off; None for any text.
        leave_after_s: seconds after which the client leaves; None if it stays.
        leave_after_chunks: chunks of a stream after which it leaves; None if it stays.
    """

    kind: str
    path: str
    body: dict[str, Any]
    form: str | None = None
    leave_after_s: float | None = None
    leave_after_chunks: int | None = None

    @property
    def num_choices(self) -> int:
        return self.body.get("n", 1)


def random_job(rng: random.Random, *, may_leave: bool = True, may_search: bool = True) -> Job:
    """A random job.

    Args:
        rng: decides everything.
        may_leave: whether the client may leave before the end.
        may_search: whether it may be a beam search.
    """
    is_chat, is_stream = rng.random() < 0.4, rng.random() < 0.6
    kind = "chat" if is_chat else "completion"
    text = rng.choice(["", "", *PREFIXES]) + " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 60, 120))))
    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 4, 16, 40, 80, 160)),
        "priority": rng.randint(-2, 2),
        "stream": is_stream,
    }
    if is_stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if is_chat:
        messages = [{"role": "user", "content": text}]
        if rng.random() < 0.3:
            messages = [{"role": "system", "content": PREFIXES[0]}, *messages]
        body["messages"] = messages
    else:
        body["prompt"] = [rng.randrange(100, 40_000) for _ in range(len(text) // 4)] or [17]
        if rng.random() < 0.7:
            body["prompt"] = text
    form = None
    draw = rng.random()
    if draw < 0.2:
        fields, form = rng.choice(FORMS)
        body |= fields
        kind = "structured outputs"
    elif draw < 0.28 and may_search:
        body |= {"use_beam_search": True, "n": rng.randint(2, 4), "temperature": 0, "stream": False}
        body |= {"length_penalty": rng.choice((0.5, 1.0, 1.5)), "early_stopping": rng.random() < 0.5}
        body.pop("stream_options", None)
        kind = "beam search"
    elif draw < 0.36:
        body |= {"prompt_logprobs": rng.randint(0, 5), "stream": False}
        body.pop("stream_options", None)
        kind = "prompt_logprobs"
    elif draw < 0.56:
        body["n"] = rng.randint(2, 4)
        kind = "n > 1"
    if kind != "beam search":
        _add_sampling(rng, body, is_structured=form is not None)
        if rng.random() < 0.2:
            body |= (
                {"logprobs": True, "top_logprobs": rng.randint(0, 5)} if is_chat else {"logprobs": rng.randint(0, 5)}
            )
    for name, value in (
        ("cache_salt", rng.choice("abc")),
        ("tenant", rng.choice("abc")),
        ("deadline_s", rng.uniform(0.1, 20)),
        ("request_id", f"soak-{rng.getrandbits(64):x}"),
        ("return_token_ids", True),
        ("unknown", 1),
    ):
        if rng.random() < 0.1:
            body[name] = value
    leave_after_s = leave_after_chunks = None
    if may_leave and rng.random() < 0.25:
        if body["stream"] and rng.random() < 0.5:
            leave_after_chunks = rng.randint(1, 20)
        else:
            leave_after_s = rng.choice((0.0, 0.02, 0.3, 2.0)) * rng.random()
    return Job(kind, CHAT if is_chat else COMPLETIONS, body, form, leave_after_s, leave_after_chunks)


def _add_sampling(rng: random.Random, body: dict[str, Any], *, is_structured: bool) -> None:
    """Choose how to sample and when to stop. Greedy requests have n = 1, and constrained ones no stop string."""
    if "n" not in body and rng.random() < 0.3:
        body["temperature"] = 0
    else:
        body["temperature"] = rng.choice((0.3, 0.8, 1.5))
        body |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 100}))
        if rng.random() < 0.5:
            body["seed"] = rng.randint(-(2**63), 2**63)
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if not is_structured:
        if rng.random() < 0.1:
            body["logit_bias"] = {str(rng.randrange(40_000)): 5.0 for _ in range(20)}
        if rng.random() < 0.2:
            body |= {
                "stop": rng.choice((["e"], ["\n", " the"], ". ")),
                "include_stop_str_in_output": rng.random() < 0.5,
            }
        if rng.random() < 0.3:
            body["ignore_eos"] = True
        elif rng.random() < 0.2:
            body["min_tokens"] = 1


CONTROLS = [
    {"path": COMPLETIONS, "prompt": "The loom and the", "temperature": 0, "ignore_eos": True, "logprobs": 2},
    {"path": COMPLETIONS, "prompt": PREFIXES[1], "temperature": 0.9, "seed": 7, "n": 2, "frequency_penalty": 0.3},
    {"path": COMPLETIONS, "prompt": "A date: ", "temperature": 1, "seed": -3, "structured_outputs": {"regex": DATE}},
    {"path": CHAT, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0},
    {"path": CHAT, "messages": [{"role": "user", "content": "A colour."}], "temperature": 0.7, "seed": 11,
     "logprobs": True, "top_logprobs": 2, **FORMS[0][0]},
    {"path": COMPLETIONS, "prompt": PREFIXES[0], "temperature": 0, "use_beam_search": True, "n": 3},
    {"path": COMPLETIONS, "prompt": PREFIXES[2], "temperature": 0, "prompt_logprobs": 2},
]  # fmt: skip
"""Requests whose answers must never change. The last two cannot be streamed."""


def control_jobs() -> list[Job]:
    """The controls, whole and, where that is possible, streamed."""
    jobs = []
    for control in CONTROLS:
        body = {"max_tokens": 24, **control}
        path = body.pop("path")
        jobs.append(Job("control", path, {**body, "stream": False}))
        if not ("use_beam_search" in body or "prompt_logprobs" in body):
            jobs.append(Job("control", path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    return jobs


@dataclass
class Account:
    """What clients have seen.

    Attributes:
        outcomes: number of requests by (kind, outcome).
        accepted: requests that the engine has certainly accepted.
        unknown: requests that it may have accepted: their clients left before the answer began.
        prompt_tokens, output_tokens: told to clients.
        problems: what must not happen.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    accepted: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Requests of all kinds with this outcome."""
        return sum(n for (_, o), n in self.outcomes.items() if o == outcome)

    def add_usage(self, usage: dict[str, Any] | None) -> None:
        """Add the tokens that a client was told of."""
        if usage is not None:
            self.prompt_tokens += usage["prompt_tokens"]
            self.output_tokens += usage["completion_tokens"]


Choices = list[dict[str, Any]]


async def send(session: aiohttp.ClientSession, job: Job, account: Account) -> Choices | None:
    """Send a job and account for it; returns the choices of a whole answer, None if there is none."""
    state = _Progress()
    choices = None
    try:
        async with asyncio.timeout(PATIENCE_S if job.leave_after_s is None else job.leave_after_s):
            outcome, choices = await _exchange(session, job, state)
    except TimeoutError:
        outcome = "left" if job.leave_after_s is not None else f"no answer in {PATIENCE_S:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    if state.has_begun:
        account.accepted += 1
    elif outcome == "left":
        account.unknown += 1
    account.add_usage(state.usage)
    if outcome == "left":
        outcome = "left mid-stream" if state.has_begun else "left early"
    if outcome not in ("answered", "left mid-stream", "left early", "503"):
        account.problems.append(f"{job.kind}: {outcome}; the request was {json.dumps(job.body)[:1000]}")
        outcome = "failed"
    account.outcomes[job.kind, outcome] += 1
    return choices


@dataclass
class _Progress:
    """How far an exchange has come: whether the answer has begun, and the last usage in it."""

    has_begun: bool = False
    usage: dict[str, Any] | None = None


async def _exchange(session: aiohttp.ClientSession, job: Job, state: _Progress) -> tuple[str, Choices | None]:
    """The outcome and the choices of a job."""
    async with session.post(job.path, json=job.body) as response:
        if response.status == 503:
            await response.read()
            return "503", None
        if response.status != 200:
            return f"status {response.status}: {(await response.text())[:300]}", None
        state.has_begun = True
        if not job.body["stream"]:
            answer = await response.json()
            state.usage = answer["usage"]
            choices = [_plain(choice) for choice in answer["choices"]]
        else:
            parts: dict[int, Choices] = defaultdict(list)
            num_chunks = 0
            is_done = False
            async for data in events(response):
                if is_done:
                    return "a stream goes on after [DONE]", None
                if data == "[DONE]":
                    is_done = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    return f"an error in the stream: {data[:300]}", None
                state.usage = chunk.get("usage") or state.usage
                for choice in chunk["choices"]:
                    parts[choice["index"]].append(_plain(choice))
                num_chunks += 1
                if num_chunks == job.leave_after_chunks:
                    response.close()
                    return "left", None
            if not is_done:
                return "a stream ended without [DONE]", None
            choices = [_joined(parts[index]) for index in sorted(parts)]
    return _fault(job, choices, state.usage) or "answered", choices


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of server-sent events, one line each."""
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].decode()


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of any endpoint, streamed or whole, in one form."""
    message = choice.get("message") or choice.get("delta") or {}
    logprobs = choice.get("logprobs")
    return {
        "index": choice["index"],
        "text": choice.get("text") or message.get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "logprobs": {name: list(values) for name, values in logprobs.items()} if logprobs else None,
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def _joined(parts: Choices) -> dict[str, Any]:
    """The choice whose parts came in chunks."""
    whole = dict(parts[0])
    for part in parts[1:]:
        whole["text"] += part["text"]
        if whole["finish_reason"] is not None:
            raise ValueError("a choice goes on after its finish_reason")
        whole["finish_reason"] = part["finish_reason"]
        if whole["logprobs"] is None:
            whole["logprobs"] = part["logprobs"]
        elif part["logprobs"] is not None:
            whole["logprobs"] = {name: values + part["logprobs"][name] for name, values in whole["logprobs"].items()}
    return whole


def _fault(job: Job, choices: Choices, usage: dict[str, Any] | None) -> str | None:
    """What is wrong with a whole answer; None if nothing is."""
    if [choice["index"] for choice in choices] != list(range(job.num_choices)):
        return f"choices {[choice['index'] for choice in choices]} instead of {job.num_choices}"
    if usage is None or not 0 < usage["completion_tokens"] <= job.num_choices * job.body["max_tokens"]:
        return f"usage {usage}"
    for choice in choices:
        if choice["finish_reason"] not in ("stop", "length"):
            return f"finish_reason {choice['finish_reason']!r}"
        if job.body.get("logprobs") not in (None, False) and not choice["logprobs"]:
            return "no logprobs"
        if job.form is not None and choice["finish_reason"] == "stop" and not _has_form(choice["text"], job.form):
            return f"the answer is not of the form {job.form!r}: {choice['text']!r}"
    return None


def _has_form(text: str, form: str) -> bool:
    if form != "json":
        return re.fullmatch(form, text) is not None
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
