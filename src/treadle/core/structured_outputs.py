"""Constraints on the text of an answer. Names are those of vLLM's StructuredOutputsParams."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from treadle.core.errors import InvalidRequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the whole generated text. Exactly one of the first five fields must be given.

    Attributes:
        json: a JSON schema, as a mapping, as text, or true for any JSON value.
        regex: a regular expression that the whole text matches (the syntax of Rust's regex crate).
        choice: the texts to choose from.
        grammar: a context-free grammar, in llguidance's dialect of Lark or in GBNF.
        json_object: any JSON object.
        disable_any_whitespace: allow no whitespace between JSON tokens.
        whitespace_pattern: a regular expression for the whitespace between JSON tokens.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(name, "must be true or false", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) is not None and name != "json_object"]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise InvalidRequestError(
                "structured_outputs", f"give exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
            )
        if self.json is not None and not isinstance(self.json, (str, dict, bool)):
            raise _wrong("json", "must be a JSON schema", self.json)
        if self.json is False:
            raise _wrong("json", "must allow some text; the schema false allows none", self.json)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise _wrong(name, "must be a string", value)
        if self.choice is not None and (
            isinstance(self.choice, str)
            or not isinstance(self.choice, Sequence)
            or not self.choice
            or not all(isinstance(text, str) and text for text in self.choice)
        ):
            raise _wrong("choice", "must be a non-empty list of non-empty strings", self.choice)
        if (self.disable_any_whitespace or self.whitespace_pattern) and not self.is_json:
            name = "whitespace_pattern" if self.whitespace_pattern else "disable_any_whitespace"
            raise InvalidRequestError(f"structured_outputs.{name}", "is only valid with json or json_object")
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        _check_text("choice", list(self.choice or ()))

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams | None":
        """Convert a mapping, or return `value` unchanged if it is None or already converted.

        Raises:
            InvalidRequestError: `value` is anything else, or the mapping has an unknown key.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise InvalidRequestError("structured_outputs", f"must be a mapping, got {value!r}")
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(str(name) for name in set(value) - known)
        if unknown:
            raise InvalidRequestError(
                "structured_outputs", f"unknown key {unknown[0]!r}; valid keys are {sorted(known)}"
            )
        return cls(**{name: part for name, part in value.items() if part is not None})

    @property
    def is_json(self) -> bool:
        """Whether the constraint is one of the JSON kinds."""
        return self.json is not None or bool(self.json_object)

    @property
    def num_chars(self) -> int:
        """Length of all that is given, for limits; JSON counts as serialized text."""
        given = [getattr(self, entry.name) for entry in fields(self)]
        return sum(
            len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False, default=list))
            for value in given
            if value not in (None, False)
        )

    def to_json(self) -> str:
        """All fields as a JSON object in one line."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if self.choice is not None:
            values["choice"] = list(self.choice)
        return json.dumps(values)


def _check_text(name: str, value: Any) -> None:
    """Raise InvalidRequestError unless `value` can be written as Unicode text."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except RecursionError:
        raise InvalidRequestError(f"structured_outputs.{name}", "is too deeply nested; simplify it") from None
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise InvalidRequestError(
            f"structured_outputs.{name}", f"must be Unicode text; {found!r} is half of a surrogate pair"
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"structured_outputs.{name}", f"cannot be written as JSON: {error}") from None


def _wrong(name: str, wanted: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs.{name}", f"{wanted}, got {str(value)[:100]!r}")
