"""The architectures that can be loaded: one module of this package each, and those that other packages provide.

Every module of this package defines an `ARCHITECTURE`. Another package registers one under the entry-point group
`treadle.architectures`; the entry point refers to an `Architecture` object.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from treadle.core.errors import UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat
from treadle.models.gguf_metadata import GGUFMetadata

ENTRY_POINT_GROUP = "treadle.architectures"


class Architectures(NamedTuple):
    """All architectures, and the entry points that could not be loaded.

    Attributes:
        usable: the built-in ones, sorted by name, then those of other packages.
        broken: one message per entry point that could not be loaded.
    """

    usable: tuple[Architecture, ...]
    broken: tuple[str, ...]


def all_architectures() -> Architectures:
    """The built-in architectures and those of other packages."""
    usable = list(_built_in())
    broken = []
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            usable.append(_load(entry, usable))
        except Exception as error:  # an error in another package must not affect other models
            broken.append(f"entry point {_origin(entry)}: {type(error).__name__}: {error}")
    return Architectures(tuple(usable), tuple(broken))


def find_huggingface(names: Sequence[str], source: str) -> CheckpointFormat[ModelMetadata]:
    """The format of the first architecture with one of `names` in config.json; UnsupportedModelError if none has.

    Args:
        names: architectures of the model.
        source: the file, in the message.
    """
    for architecture in _one_by_one():
        if architecture.huggingface.name in names:
            return architecture.huggingface
    raise _unsupported(f"{source}: architecture {', '.join(names) or '(none named)'}", huggingface_names())


def find_gguf(name: str, source: str) -> CheckpointFormat[GGUFMetadata]:
    """The format of the architecture called `name` in GGUF files; UnsupportedModelError if there is none.

    Args:
        name: architecture of the model.
        source: the file, in the message.
    """
    for architecture in _one_by_one():
        if architecture.gguf is not None and architecture.gguf.name == name:
            return architecture.gguf
    raise _unsupported(f"{source}: GGUF architecture {name!r}", gguf_names())


def huggingface_names() -> list[str]:
    """The names in config.json of the architectures that can be loaded."""
    return [architecture.huggingface.name for architecture in all_architectures().usable]


def gguf_names() -> list[str]:
    """The names in GGUF files of the architectures that can be loaded."""
    return [a.gguf.name for a in all_architectures().usable if a.gguf is not None]


def _one_by_one() -> Iterator[Architecture]:
    # Code of other packages runs only if no built-in architecture matches.
    yield from _built_in()
    yield from all_architectures().usable[len(_built_in()) :]


@cache
def _built_in() -> tuple[Architecture, ...]:
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return tuple(sorted((module.ARCHITECTURE for module in modules), key=lambda a: a.huggingface.name))


def _load(entry: EntryPoint, others: Sequence[Architecture]) -> Architecture:
    architecture = entry.load()
    if not isinstance(architecture, Architecture):
        raise TypeError(f"must be a treadle.models.Architecture, not a {type(architecture).__name__}")
    for other in others:
        if other.huggingface.name == architecture.huggingface.name:
            raise ValueError(f"there is another architecture {other.huggingface.name!r}")
        if other.gguf and architecture.gguf and other.gguf.name == architecture.gguf.name:
            raise ValueError(f"there is another GGUF architecture {other.gguf.name!r}")
    return architecture


def _origin(entry: EntryPoint) -> str:
    package = f" of package {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.name!r} ({entry.value}){package}"


def _unsupported(what: str, names: Sequence[str]) -> UnsupportedModelError:
    message = f"{what} is not supported; supported are {', '.join(names)}"
    broken = all_architectures().broken
    if broken:
        message += f". Not loaded: {'; '.join(broken)}"
    return UnsupportedModelError(message)
