"""A wrong body: the answer names the field that the client wrote, its value, and what it must be."""

import json

import httpx2
import pytest

from server.conftest import PATIENCE_S
from treadle.server.body_errors import as_json, json_path

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}


def test_a_path_is_written_as_in_javascript():
    assert json_path(["messages", 0, "content"]) == "messages[0].content"
    assert json_path(["logit_bias", "1 2"]) == 'logit_bias["1 2"]'
    assert json_path(["x" * 200]) == f'["{"x" * 99} …]'


def test_a_quoted_value_is_bounded():
    assert as_json({"a": [1, None, "é"]}) == '{"a": [1, null, "é"]}'
    assert len(as_json([list(range(1000))] * 1000)) < 110
    assert len(as_json("x" * 10**6)) < 110


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        # Each type, and the values that a lenient reader would take for it.
        (TEXT, {"max_tokens": "16"}, "max_tokens", 'must be an integer, got "16"'),
        (TEXT, {"max_tokens": True}, "max_tokens", "must be an integer, got true"),
        (TEXT, {"max_tokens": 1.5}, "max_tokens", "must be an integer, got 1.5"),
        (TEXT, {"temperature": "0.5"}, "temperature", 'must be a number, got "0.5"'),
        (TEXT, {"temperature": False}, "temperature", "must be a number, got false"),
        (TEXT, {"stream": 1}, "stream", "must be true or false, got 1"),
        (TEXT, {"echo": "yes"}, "echo", 'must be true or false, got "yes"'),
        (TEXT, {"user": 5}, "user", "must be a string, got 5"),
        (TEXT, {"structured_outputs": []}, "structured_outputs", "must be an object, got []"),
        (TEXT, {"stream_options": 3, "stream": True}, "stream_options", "must be an object, got 3"),
        # Unions: the alternative that the client meant.
        (TEXT, {"prompt": 5}, "prompt", "must be a string or a list, got 5"),
        (TEXT, {"prompt": {}}, "prompt", "must be a string or a list, got {}"),
        (TEXT, {"prompt": [1, 2, "a"]}, "prompt[2]", 'must be an integer, got "a"'),
        (TEXT, {"prompt": ["a", 2]}, "prompt[1]", "must be a string, got 2"),
        (TEXT, {"prompt": [[1], [2, None]]}, "prompt[1][1]", "must be an integer, got null"),
        (TEXT, {"prompt": [True]}, "prompt[0]", "must be an integer, a string or a list, got true"),
        (TEXT, {"stop": 7}, "stop", "must be a string or a list, got 7"),
        (TEXT, {"stop": ["a", 7]}, "stop[1]", "must be a string, got 7"),
        (TEXT, {"early_stopping": "always"}, "early_stopping", "must be true or false or 'never', got \"always\""),
        (TEXT, {"stop_token_ids": [1, True]}, "stop_token_ids[1]", "must be an integer, got true"),
        (TEXT, {"logit_bias": {"5": "x"}}, 'logit_bias["5"]', 'must be a number, got "x"'),
        (TEXT, {"logit_bias": {"05": 1}}, "logit_bias", "keys must be token ids, got '05'"),
        (TEXT, {"logit_bias": {" 5": 1}}, "logit_bias", "keys must be token ids, got ' 5'"),
        # Objects in objects.
        (TEXT, {"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object' or"),
        (TEXT, {"response_format": {}}, "response_format.type", "is required"),
        (
            TEXT,
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            TEXT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
            "must be an object or true or false, got 5",
        ),
        (
            TEXT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format",
            "the schema false allows none",
        ),
        (TEXT, {"structured_outputs": {"json": False}}, "structured_outputs.json", "the schema false allows none"),
        (
            TEXT,
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}},
            "structured_outputs.disable_any_whitespace",
            "must be true or false, got 'no'",
        ),
        (TEXT, {"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "must be true or false"),
        (CHAT, {"messages": [1]}, "messages[0]", "must be an object, got 1"),
        (CHAT, {"messages": "hi"}, "messages", 'must be a list, got "hi"'),
        (CHAT, {"messages": [{}] * 5000}, "messages", "must have at most 4096 entries, got"),
        (
            CHAT,
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "must be",
        ),
        # The field that was set, where the engine's has another name.
        (TEXT, {"best_of": 129}, "best_of", "must be between 1 and 128, got 129"),
        (TEXT, {"n": 2, "best_of": 1}, "best_of", "must be at least n (2), got 1"),
        (TEXT, {"best_of": 2, "temperature": 0}, "best_of", "must be 1 with greedy sampling"),
        (TEXT, {"prompt": [10**9]}, "prompt", "is outside the vocabulary"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "is empty"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1, got 0"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_completion_tokens", "maximum context length is 1024 tokens"),
        (
            CHAT,
            {"max_completion_tokens": 5, "min_tokens": 7},
            "min_tokens",
            "must be at most max_completion_tokens (5), got 7",
        ),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": -4}, "max_completion_tokens", "is 5, but max_tokens is -4"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a " * 3000}]},
            "messages",
            "maximum context length is 1024",
        ),
        (CHAT, {"min_tokens": 2000}, "min_tokens", "the tokens that fit after a prompt of"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]", 'must be an integer, got "2"'),
        ("/tokenize", {"add_special_tokens": 0, "prompt": "a"}, "add_special_tokens", "must be true or false, got 0"),
    ],
)
def test_the_answer_names_the_field(server, path, fields, param, message):
    needed = {TEXT: {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.get(path, {})
    answer = server.post(path, {**needed, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert message in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"temperature": 1, "seed": -1, "logit_bias": {"5": 1, "0": -2.5}}),
        (TEXT, {"structured_outputs": {"json": True, "disable_any_whitespace": None, "regex": None}}),
        (CHAT, {"max_completion_tokens": 3, "max_tokens": 3}),
        (CHAT, {"response_format": {**SCHEMA, "json_schema": {"schema": True, "name": "x", "strict": True}}}),
    ],
)
def test_values_of_the_right_type_are_taken(server, path, fields):
    needed = {TEXT: {"prompt": "a", "max_tokens": 3}, CHAT: {"messages": MESSAGES, "max_tokens": 3}}[path]
    answer = server.post(path, {**needed, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "header", "message"),
    [
        (b"", "application/json", "the body is missing; it must be a JSON object"),
        (b'{"prompt": "a"}', "text/plain", "the body must be a JSON object, sent with the header"),
        (b"[]", "application/json", "must be a JSON object"),
        (b'"a"', "application/json", "must be a JSON object"),
        (b'{"prompt": }', "application/json", "the body is not valid JSON"),
    ],
)
def test_a_body_that_is_no_object(server, body, header, message):
    answer = httpx2.post(server.url + TEXT, content=body, headers={"content-type": header}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    error = json.loads(answer.text)["error"]
    assert message in error["message"]
    assert error["param"] is None
