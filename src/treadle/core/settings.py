"""Settings: dataclass fields that say what they do and what they may be.

Each is declared once. The check of a value, the command line's option and the row in docs/settings.md follow from the
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
"""The headings under which people find settings, in order."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a field's declaration says beside its name and type.

    Attributes:
        help: what it does, with its unit.
        group: one of GROUPS.
        default: the value without one being given.
        default_text: the default in words, where the value does not say it ("" if nothing is to be said).
        choices: the allowed values; empty for any.
        low: least value of an integer, if it has one.
        metavar: what stands for the value in the usage; by default it follows from the type.
    """

    help: str
    group: str
    default: Any
    default_text: str | None = None
    choices: tuple[Any, ...] = ()
    low: int | None = None
    metavar: str | None = None

    @property
    def default_in_words(self) -> str:
        """The default as documentation shows it; "" if there is nothing to show."""
        if self.default_text is not None:
            return self.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return "" if self.default is None else f"{self.default}"

    @property
    def choice_texts(self) -> list[str]:
        """The choices that can be named; None means that none is given."""
        return [choice for choice in self.choices if choice is not None]


def setting(default: Any, help: str, *, group: str, **details: Any) -> Any:
    """A dataclass field that is a setting.

    Args:
        default: its default.
        help, group, details: as `Setting` has them.
    """
    return field(default=default, metadata={_KEY: Setting(help=help, group=group, default=default, **details)})


def settings_of(config: type[Any]) -> dict[str, Setting]:
    """Name → declaration of the settings of a dataclass, group by group."""
    found = {entry.name: entry.metadata[_KEY] for entry in fields(config) if _KEY in entry.metadata}
    return dict(sorted(found.items(), key=lambda item: GROUPS.index(item[1].group)))


def value_type(config: type[Any], name: str) -> tuple[type, bool]:
    """The type of a setting's value (str where several will do) and whether it may be None."""
    hint: Any = typing.get_type_hints(config)[name]
    if not isinstance(hint, types.UnionType):
        return hint, False
    parts = set(typing.get_args(hint))
    is_optional = type(None) in parts
    parts.discard(type(None))
    return (str if str in parts else parts.pop()), is_optional


def check_settings(config: Any, declared_in: type[Any]) -> None:
    """Raise ConfigError for the first value of `config` that the declarations in a class do not allow."""
    for name, declared in settings_of(declared_in).items():
        value = getattr(config, name)
        if declared.choices and value not in declared.choices:
            allowed = ", ".join(map(str, declared.choices))
            raise ConfigError(name, f"must be one of {allowed}; got {value!r}")
        if declared.low is not None and not (value is None and declared.default is None):
            check_count(name, value, declared.low)


def check_count(field: str, value: Any, low: int = 1) -> None:
    """Raise ConfigError unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(field, f"must be an integer, got {value!r}")
    if operator.index(value) < low:
        raise ConfigError(field, f"must be at least {low}, got {value}")
