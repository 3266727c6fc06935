"""Request bodies: what null means, and what a hostile one may cost."""

import json

import pytest
from pydantic import ValidationError

from treadle.core.errors import InvalidRequestError
from treadle.server.middleware import has_lone_surrogate
from treadle.server.protocol import ChatRequest, CompletionRequest


def test_null_is_the_default_of_every_field_that_has_one():
    fields = {name: None for name, field in CompletionRequest.model_fields.items() if not field.is_required()}
    assert CompletionRequest.model_validate({"prompt": "a", **fields}) == CompletionRequest(prompt="a")
    fields = {name: None for name, field in ChatRequest.model_fields.items() if not field.is_required()}
    assert ChatRequest.model_validate({"messages": [], **fields}) == ChatRequest(messages=[])
    options = {"include_usage": None, "continuous_usage_stats": True}
    body = CompletionRequest.model_validate({"prompt": "a", "stream_options": options})
    assert body.stream_options.include_usage is False
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": None})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CompletionRequest, "prompt", [{}] * 100_000),
        (CompletionRequest, "prompt", [[[]]] * 100_000),
        (CompletionRequest, "stop", [1] * 100_000),
        (CompletionRequest, "stop_token_ids", ["x"] * 100_000),
        (CompletionRequest, "allowed_token_ids", [[]] * 100_000),
        (ChatRequest, "messages", [1] * 100_000),
        (ChatRequest, "messages", [{}] * 100_000),
    ],
)
def test_a_list_of_wrong_items_is_one_error(kind, field, value):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"prompt": "a", "messages": [], field: value})
    assert len(caught.value.errors()) <= 8
    assert caught.value.errors()[0]["loc"][0] == field


def test_few_unknown_fields_are_ignored_and_many_refused(caplog):
    caplog.set_level("INFO", "treadle")
    CompletionRequest.model_validate({"prompt": "a", "new\nline": 1})
    assert "'new\\nline'" in caplog.text
    with pytest.raises(ValidationError, match="101 unknown fields") as caught:
        CompletionRequest.model_validate({"prompt": "a", **{f"x{i}": 1 for i in range(101)}})
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, InvalidRequestError)
    assert error.field == "x0"


@pytest.mark.parametrize(
    ("text", "is_lone"),
    [
        ('"\\ud83d\\ude00"', False),
        ('"\\\\ud83d"', False),
        ('"\\ud83d"', True),
        ('"\\ude00"', True),
        ('"\\ude00\\ud83d"', True),
        ('"\\ud83d\\ud83d\\ude00"', True),
        ('"\\\\\\uD800"', True),
        ('{"\\udfff": 1}', True),
        ('"\U0001f600 \ud7ff \ue000"', False),
    ],
)
def test_lone_surrogates_are_found(text, is_lone):
    assert has_lone_surrogate(text.encode()) is is_lone
    assert has_lone_surrogate(json.dumps(json.loads(text)).encode()) is is_lone
    assert (
        has_lone_surrogate(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "surrogatepass"))
        is is_lone
    )
