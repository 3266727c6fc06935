"""Typed access to what a model's files say about it: every value is checked where it is read."""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treadle.core.errors import ModelLoadError

MAX_SIZE = 2**31 - 1
"""Largest dimension, count or token id that is accepted: kernels and plans keep them in int32."""


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


class ModelMetadata(Mapping[str, Any]):
    """The values of one metadata file by key.

    A mapping, so that `metadata[key]` gives a value as it is. The getters raise ModelLoadError with the file, the
    key, the value and what was expected. For them a key whose value is None is absent, as null is in config.json.

    Args:
        values: key → value.
        source: the file, as errors name it.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str) -> "ModelMetadata":
        """`values` itself if it is one, else a new one."""
        return values if isinstance(values, ModelMetadata) else cls(values, source)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, key: str, expected: str, value: object) -> ModelLoadError:
        """The error for a value that is not what was expected; `expected` continues "must be"."""
        return ModelLoadError(f"{self.source}: {key} must be {expected}, got {_short.repr(value)}")

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """An integer from `minimum` to `maximum`; `default` if it is absent, which without one is an error."""
        value = self._find(key, default)
        if not _is_integer(value) or not minimum <= value <= maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}", value)
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, minimum: float = -math.inf, above: float = -math.inf
    ) -> float:
        """A finite number, at least `minimum` and greater than `above`; `default` as in `integer`."""
        value = self._find(key, default)
        if not is_finite(value) or value < minimum or value <= above:
            bounds = [f"of at least {minimum:g}"] if minimum > -math.inf else []
            bounds += [f"greater than {above:g}"] if above > -math.inf else []
            raise self.error(key, " ".join(["a finite number", *bounds]), value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Text; `default` as in `integer`."""
        value = self._find(key, default)
        if not is_text(value):
            raise self.error(key, "text", value)
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` if it is absent."""
        value = self._find(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def section(self, key: str) -> "ModelMetadata":
        """The object under `key`, empty if it is absent."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return ModelMetadata(value, f"{self.source}: {key}")

    def texts(self, key: str, *, length: int | None = None) -> list[str]:
        """A list of texts, `length` of them if given; empty if it is absent."""
        return self._list(key, length, {str}, is_text, "texts")

    def integers(self, key: str, *, length: int | None = None) -> list[int]:
        """A list of integers, `length` of them if given; empty if it is absent."""
        return self._list(key, length, {int}, _is_integer, "integers")

    def numbers(self, key: str, *, length: int | None = None) -> list[float]:
        """A list of finite numbers, `length` of them if given; empty if it is absent."""
        return self._list(key, length, {int, float}, is_finite, "finite numbers")

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """A token id or a list of them, each below `vocab_size`; empty if the key is absent."""
        value = self._values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not _is_integer(token_id) or not 0 <= token_id < vocab_size:
                raise self.error(key, f"a token id from 0 to {vocab_size - 1}", token_id)
        return ids

    def _find(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is None and default is None:
            raise ModelLoadError(f"{self.source} lacks {key!r}")
        return default if value is None else value

    def _list(
        self, key: str, length: int | None, types: set[type], is_valid: Callable[[Any], bool], kind: str
    ) -> list[Any]:
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(key, f"a list of {kind}", value)
        if length is not None and len(value) != length:
            raise ModelLoadError(f"{self.source}: {key} must have {length} entries, got {len(value)}")
        # A vocabulary has 100,000 and more entries: a call for each only if there is something to find.
        if not set(map(type, value)) <= types or not _all_valid(value, types):
            for i, item in enumerate(value):
                if not is_valid(item):
                    raise self.error(f"{key}[{i}]", f"one of a list of {kind}", item)
        return value


def is_text(value: object) -> bool:
    """Whether it is a str that can be encoded as UTF-8; JSON can express half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_finite(value: object) -> bool:
    """Whether it is a number that a float holds, neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _all_valid(values: list[Any], types: set[type]) -> bool:
    """Whether the values, each of one of `types`, are all valid; quick."""
    if str in types:
        return is_text("".join(values))
    try:
        return float not in types or all(map(math.isfinite, values))
    except OverflowError:
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
