"""Settings: dataclass fields that carry their help and their allowed values.

Each is declared once. Its validation, its command-line option and its row in docs/settings.md are generated from the
declaration.
"""

import operator
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex

from treadle.core.errors import ConfigError

_KEY = "setting"

GROUPS = ("model and processor", "KV cache", "scheduling", "requests", "watching")
"""The headings of settings in help and docs, in order."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a field declares besides its name and type.

    Attributes:
        help: what it does, with its unit.
        group: one of GROUPS.
        default: its default value.
        default_text: the default in words, if the value is not clear by itself ("" to show none).
        choices: the allowed values; empty for any.
        low, high: minimum and maximum of an integer, if any; without `low` neither is checked.
        metavar: placeholder of the value in the usage; by default it follows from the type.
    """

    help: str
    group: str
    default: Any
    default_text: str | None = None
    choices: tuple[Any, ...] = ()
    low: int | None = None
    high: int | None = None
    metavar: str | None = None

    @property
    def default_in_words(self) -> str:
        """The default as shown in documentation; "" to show none."""
        if self.default_text is not None:
            return self.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return "" if self.default is None else f"{self.default}"

    @property
    def choice_texts(self) -> list[str]:
        """The choices that can be written on the command line, which excludes None."""
        return [choice for choice in self.choices if choice is not None]


def setting(default: Any, help: str, *, group: str, **details: Any) -> Any:
    """A dataclass field that is a setting.

    Args:
        default: its default.
        help, group, details: attributes of `Setting`.
    """
    return field(default=default, metadata={_KEY: Setting(help=help, group=group, default=default, **details)})


def settings_of(config: type[Any]) -> dict[str, Setting]:
    """Name → declaration of the settings of a dataclass, group by group."""
    found = {entry.name: entry.metadata[_KEY] for entry in fields(config) if _KEY in entry.metadata}
    return dict(sorted(found.items(), key=lambda item: GROUPS.index(item[1].group)))


def value_type(config: type[Any], name: str) -> tuple[type, bool]:
    """The type of a setting's value (str if several are allowed) and whether it may be None."""
    hint: Any = typing.get_type_hints(config)[name]
    if not isinstance(hint, types.UnionType):
        return hint, False
    parts = set(typing.get_args(hint))
    is_optional = type(None) in parts
    parts.discard(type(None))
    return (str if str in parts else parts.pop()), is_optional


def check_settings(config: Any, declared_in: type[Any]) -> None:
    """Raise ConfigError for the first value of `config` that the declarations in `declared_in` do not allow."""
    for name, declared in settings_of(declared_in).items():
        value = getattr(config, name)
        if declared.choices and value not in declared.choices:
            allowed = ", ".join(map(str, declared.choices))
            raise ConfigError(name, f"must be one of {allowed}; got {value!r}")
        if isinstance(declared.default, bool) and not isinstance(value, bool):
            raise ConfigError(name, f"must be True or False, got {value!r}")
        if isinstance(declared.default, float) and not (value is None and value_type(declared_in, name)[1]):
            _check_number(name, value)
        if declared.low is not None and not (value is None and declared.default is None):
            check_count(name, value, declared.low, declared.high)


def _check_number(field: str, value: Any) -> None:
    """Raise ConfigError unless `value` is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field, f"must be a number, got {value!r}")


def check_count(field: str, value: Any, low: int = 1, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is an integer of at least `low`, and at most `high` if that is given."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(field, f"must be an integer, got {value!r}")
    if operator.index(value) < low:
        raise ConfigError(field, f"must be at least {low}, got {value}")
    if high is not None and operator.index(value) > high:
        raise ConfigError(field, f"must be at most {high}, got {value}")
