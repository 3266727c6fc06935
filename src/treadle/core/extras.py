"""The error for a part of Treadle whose optional packages are not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

from treadle.core.errors import MissingPackageError


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Turn a failed import of a package within the block into an error that says how to install it.

    Args:
        name: the extra's name in pyproject.toml.
        what: the part of Treadle that needs it.

    Raises:
        MissingPackageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "treadle":
            raise
        raise MissingPackageError(
            f"{what} needs the package {error.name}, which is not installed; pip install 'treadle[{name}]'"
        ) from error
