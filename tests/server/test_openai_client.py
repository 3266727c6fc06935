"""openai-python against the server."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import openai
import pytest

from server.conftest import MODEL, PATIENCE_S
from treadle import SamplingParams

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name three colours."}]
JSON = {"content-type": "application/json"}
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


def test_chat(client):
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24
    # The same conversation again hits the prefix cache and gets the same answer.
    again = client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
    assert (
        client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == choice.message.content
    )


TEXTS = [
    "Emoji: 😀 👩‍👩‍👧 🎉, and then",
    "日本の首都は",
    "One, two, three,",
    "La nuit était",
    "def f(x):\n",
    "1 2 3 4 5",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, ["\n", "three"]])
def test_joined_deltas_are_the_whole_text(client, text, stop):
    options = {"prompt": text, "stop": stop, "logprobs": 2, **GREEDY}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    *chunks, last = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    # A chunk per token, even if the token has no text yet.
    assert len(chunks) == whole.usage.completion_tokens


SCRIPTS = [
    "😀🎉 party",
    "👩‍👩‍👧 family",
    "한국어로",
    "Добрый день",
    "مرحبا بكم",
    "नमस्ते",
    "Größe",
    "∑ x²",
    "こんにちは",
    "ไทย",
]


@pytest.mark.parametrize("chat", [False, True])
def test_deltas_of_fifty_prompts_join(client, chat):
    """Concurrent and sampled (so that unusual tokens occur), with stop strings for every other prompt."""
    texts = [f"{start} {end}" for start in SCRIPTS for end in ("is", "🚀", "means:\n", "1, 2,", "and ü")]

    def both(i):
        options = {
            "model": MODEL, "max_tokens": 20, "temperature": 1.2, "seed": i, "stop": ["e ", "。", "\n\n", "🎉"] if i % 2 else None,
        }  # fmt: skip
        if chat:
            options["messages"] = [{"role": "user", "content": texts[i]}]
            whole = client.chat.completions.create(**options).choices[0]
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
            return whole, whole.message.content, "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1]
        options["prompt"] = texts[i]
        whole = client.completions.create(**options).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
        return whole, whole.text, "".join(chunk.text for chunk in chunks), chunks[-1]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(both, range(len(texts))))
    assert len(answers) == 50
    for whole, text, joined, last in answers:
        assert joined == text
        assert last.finish_reason == whole.finish_reason
        assert last.stop_reason == whole.stop_reason
    # The prompts did produce multi-byte characters and stop strings.
    assert sum(not text.isascii() for _, text, _, _ in answers) > 5
    assert any(isinstance(whole.stop_reason, str) for whole, *_ in answers)


def test_streamed_chat(client):
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    chunks = list(client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_chat_logprobs(client):
    answer = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for position in content:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].logprob == position.logprob  # greedy
        assert bytes(position.bytes).decode() == position.token


def test_several_choices(client):
    options = {"prompt": "Once upon a time", "model": MODEL, "max_tokens": 8, "seed": 5, "temperature": 1.0}
    answer = client.completions.create(n=3, **options)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.completions.create(n=3, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    best = client.completions.create(n=1, extra_body={"best_of": 3}, **options)
    assert best.choices[0].text in texts
    two = client.completions.create(n=1, **{**options, "prompt": ["Once upon a time", "The end"]})
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == texts[0]


def test_loglikelihood(server, client):
    """As lm-eval does: the log-probability of a continuation, from an echoed prompt of token ids."""
    tokenizer = server.built.tokenizer
    ids = tokenizer.encode("The capital of France is Paris.")
    answer = client.completions.create(
        model=MODEL, prompt=[ids, ids[:4]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    nothing_new = client.completions.create(
        model=MODEL, prompt=[ids], max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    assert nothing_new.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]
    assert nothing_new.usage.completion_tokens == 0
    # Independent check: request the next token of each prefix.
    for i in range(1, len(ids)):
        one = client.completions.create(
            model=MODEL, prompt=[ids[:i]], max_tokens=1, logprobs=1, temperature=0,
            extra_body={"allowed_token_ids": [ids[i]]},
        )  # fmt: skip
        assert one.choices[0].logprobs.token_logprobs[0] == logprobs.token_logprobs[i]


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 1000}, 400, "n"),
        ({"logprobs": 1000}, 400, "logprobs"),
        ({"model": "gpt-9"}, 404, "model"),
        ({"stop": [""]}, 400, "stop"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [], "extra_body": {"cache_salt": "x"}}, 400, "prompt"),
        ({"temperature": 1e300}, 400, "temperature"),
        ({"extra_body": {"top_k": 2**40}}, 400, "top_k"),
        ({"extra_body": {"repetition_penalty": 1e-300}}, 400, "repetition_penalty"),
        ({"extra_body": {"priority": 10**400}}, 400, "priority"),
        ({"n": 2, "extra_body": {"use_beam_search": True, "length_penalty": 1e300}}, 400, "length_penalty"),
        ({"prompt": [10**9]}, 400, None),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, 400, "guided_json"),
        ({"extra_body": {"best_of": 0}}, 400, "best_of"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, 400, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"choice": ["a" * 140_000]}}}, 400, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"json": {}}, "ignore_eos": True}}, 400, "ignore_eos"),
        ({"extra_body": {"response_format": {"type": "json_schema"}}}, 400, "response_format.json_schema"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, 400, "response_format.type"),
        (
            {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}},
            400,
            "response_format",
        ),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, 400, "prompt_logprobs"),
    ],
)
def test_errors(client, options, status, param):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"prompt": "Hello", "model": MODEL, **options})
    assert caught.value.status_code == status
    error = caught.value.body
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_unsupported_fields_are_refused(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for options in (
        {"tools": [tool]},
        {"extra_body": {"guided_regex": "a"}},
        {"extra_body": {"chat_template": "{{ messages }}"}},
        {"extra_body": {"continue_final_message": True}},
        {"extra_body": {"bad_words": ["red"]}},
        {"extra_body": {"best_of": 3}},
    ):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            client.chat.completions.create(messages=QUESTION, model=MODEL, **options)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    with pytest.raises(openai.BadRequestError, match="only parts of type 'text'"):
        client.chat.completions.create(messages=image, model=MODEL)


def test_structured_outputs(client):
    colour = {
        "type": "object",
        "properties": {"colour": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
        "required": ["colour", "warm"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": colour, "strict": True}}
    options = {**GREEDY, "max_tokens": 80, "temperature": 0.8, "seed": 1}
    answer = client.chat.completions.create(messages=QUESTION, response_format=wanted, n=3, **options)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert list(value) == ["colour", "warm"]
        assert isinstance(value["warm"], bool)
    answer = client.chat.completions.create(
        messages=QUESTION, response_format={"type": "json_object"}, **{**options, "max_tokens": 400}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for form, pattern in (
        ({"regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
    ):
        whole = client.completions.create(prompt="It is ", extra_body={"structured_outputs": form}, **options)
        assert re.fullmatch(pattern, whole.choices[0].text)
        stream = client.completions.create(
            prompt="It is ", stream=True, extra_body={"structured_outputs": form}, **options
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_a_grammar_that_crashes_its_compiler_is_refused(server, client):
    """A neighbour's stream and later requests give the same tokens as before."""
    form = {"structured_outputs": {"regex": "[a-c]{20}"}}
    control = client.completions.create(prompt="It is ", extra_body=form, **GREEDY).choices[0].text
    options = {**GREEDY, "max_tokens": 100}
    alone = client.completions.create(prompt="Hello", **options).choices[0].text
    stream = client.completions.create(prompt="Hello", stream=True, **options)
    text = next(stream).choices[0].text
    chain = "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(4000)), 'r4000: "b"'])
    for bad in ({"grammar": chain}, {"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt="It is ", extra_body={"structured_outputs": bad}, **GREEDY)
        assert caught.value.body["param"].startswith("structured_outputs")
    lone = json.dumps({"prompt": "It is ", "structured_outputs": {"regex": "\ud800"}})
    answer = httpx2.post(server.url + "/v1/completions", content=lone, headers=JSON, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.regex")
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone
    assert client.completions.create(prompt="It is ", extra_body=form, **GREEDY).choices[0].text == control


def test_prompt_logprobs(client):
    body = {"extra_body": {"prompt_logprobs": 2, "return_token_ids": True}, **GREEDY}
    chat = client.chat.completions.create(messages=QUESTION, **body).model_dump()
    completion = client.completions.create(prompt=[chat["prompt_token_ids"]], **body).model_dump()["choices"][0]
    assert chat["prompt_logprobs"] == completion["prompt_logprobs"]
    assert chat["prompt_logprobs"][0] is None
    for token_id, position in zip(chat["prompt_token_ids"][1:], chat["prompt_logprobs"][1:], strict=True):
        assert position[str(token_id)]["logprob"] <= 0
        assert 2 <= len(position) <= 3


def test_unknown_fields_are_ignored(client):
    answer = client.completions.create(prompt="Hello", extra_body={"no_such_field": 7}, **GREEDY)
    assert answer.choices[0].text


def test_models_and_text(server, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    text = "Hello, wörld 🎉"
    ids = server.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    info = httpx2.get(server.url + "/tokenizer_info").json()
    assert server.post("/tokenize", {"prompt": info["eos_token"]}).json()["count"] == 1
    assert "im_start" in info["chat_template"]
    chat = server.post("/tokenize", {"messages": QUESTION}).json()
    assert chat["count"] == client.chat.completions.create(messages=QUESTION, **GREEDY).usage.prompt_tokens


def test_answers_equal_the_offline_engines(server, client, embedded_model):
    """Answers are bit-identical to those of the offline API, whatever else is running."""
    from treadle import LLM

    llm = LLM(quantization="int8", num_kv_blocks=100, max_model_len=512, log_stats_interval_s=0)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=16, logprobs=0)
    (expected,) = llm.generate("The sea was", params, use_tqdm=False)
    answer = client.completions.create(
        model=MODEL, prompt="The sea was", temperature=0.9, seed=3, max_tokens=16, logprobs=0
    )
    assert answer.choices[0].text == expected.outputs[0].text
    offline = [next(iter(position.values())).logprob for position in expected.outputs[0].logprobs]
    assert answer.choices[0].logprobs.token_logprobs == offline
    assert np.isfinite(offline).all()


def test_raw_events(server):
    body = {"messages": QUESTION, "stream": True, "max_tokens": 4, "temperature": 0}
    with httpx2.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=300) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["object"] == "chat.completion.chunk"


def test_the_scheduler_can_be_watched(server):
    """The state while a request runs, and a record of each of its steps."""
    body = {"prompt": "Tell me", "max_tokens": 30, "ignore_eos": True, "stream": True, "request_id": "watched"}
    records, states = [], []
    with (
        httpx2.stream("GET", server.url + "/scheduler/steps", timeout=300) as steps,
        httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer,
    ):
        for i, _ in enumerate(answer.iter_lines()):
            if i == 4:
                states.append(httpx2.get(server.url + "/scheduler/state").json())
        for line in steps.iter_lines():
            if line.startswith("data: "):
                records.append(json.loads(line[6:]))
                if "cmpl-watched" in records[-1].get("finished", ()):
                    break
    (state,) = states
    begin, *records = records
    assert set(begin) == {"state"}
    assert begin["state"]["step"] < records[0]["step"]
    assert [request["id"] for request in state["running"]] == ["cmpl-watched"]
    assert state["running"][0]["sequences"][0]["computed"] > 0
    assert state["blocks"]["referenced"] > 0
    steps_run = [record["step"] for record in records]
    assert steps_run == list(range(steps_run[0], steps_run[0] + len(steps_run)))
    kinds = [record["ran"]["cmpl-watched"]["kind"] for record in records if "cmpl-watched" in record["ran"]]
    assert set(kinds[1:]) == {"decode"}
    assert records[-1]["finished"]["cmpl-watched"]["output_tokens"] == 30
