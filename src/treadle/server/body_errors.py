"""Errors of a request body: the field as the client wrote it, its value, and what it must be."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from treadle.core.errors import InvalidRequestError, cut

MAX_SHOWN_CHARS = 100
"""Limit on a quoted value, and on a quoted name that is no identifier."""

_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""pydantic's type of an error → what it wants."""


def body_error(errors: Sequence[dict[str, Any]], body: Any) -> InvalidRequestError:
    """The error to report for pydantic's errors of a body.

    A union has errors of all its alternatives. The alternative that got furthest is what the client meant; those that
    failed at the same place are reported together.

    Args:
        errors: as FastAPI gives them: `loc` begins with "body".
        body: what was checked, parsed.

    Returns:
        An error whose field is "" if the body as a whole is wrong.
    """
    of_first_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    places = [_place(error, body) for error in of_first_field]
    place = max(places, key=lambda parts: (len(parts), parts))
    here = [error for error, found in zip(of_first_field, places, strict=True) if found == place]
    return _error_at(json_path(place), here)


def _error_at(path: str, errors: Sequence[dict[str, Any]]) -> InvalidRequestError:
    first = errors[0]
    context = first.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, InvalidRequestError):
        return InvalidRequestError(f"{path}.{cause.field}" if path else cause.field, cause.problem, cause.code)
    if first["type"] == "missing":
        return InvalidRequestError(path, "is required")
    if first["type"] == "too_long":
        most, given = context["max_length"], context["actual_length"]
        return InvalidRequestError(path, f"must have at most {most} entries, got {given}")
    wanted = [_WANTED.get(error["type"]) or error.get("ctx", {}).get("expected") for error in errors]
    if not path or None in wanted:
        return InvalidRequestError(path, first["msg"])
    *others, last = dict.fromkeys(wanted)
    alternatives = f"{', '.join(others)} or {last}" if others else last
    return InvalidRequestError(path, f"must be {alternatives}, got {as_json(first['input'])}")


def _place(error: dict[str, Any], body: Any) -> list[Any]:
    """Where an error is: its `loc` without "body" and without what names an alternative of a union."""
    is_missing = error["type"] == "missing"
    parts = []
    value = body
    for part in error["loc"][1:]:
        if value is error["input"] and not is_missing:
            break  # what follows names alternatives
        is_inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_inside:
            value = value[part]
        if is_inside or (is_missing and part == error["loc"][-1]):
            parts.append(part)
    return parts


def json_path(parts: Iterable[str | int]) -> str:
    """Names and places that lead to a value, in the form `messages[0].content`."""
    path = ""
    for part in parts:
        if isinstance(part, str) and part.isidentifier() and len(part) <= MAX_SHOWN_CHARS:
            path += f".{part}" if path else part
        else:
            path += f"[{as_json(part)}]"
    return path


def as_json(value: Any) -> str:
    """The beginning of a value as JSON; the work does not grow with the value, except for a long string."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += piece[: MAX_SHOWN_CHARS + 1]
        if len(text) > MAX_SHOWN_CHARS:
            break
    return cut(text, MAX_SHOWN_CHARS)
