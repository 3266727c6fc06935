"""The errors that Treadle raises.

::

    TreadleError
    ├── InvalidRequestError (ValueError)   an invalid request; names the field, the value and the limit
    ├── ConfigError (ValueError)           an invalid engine setting
    ├── UsageError (ValueError)            an invalid option of the command line
    ├── ModelLoadError (ValueError)        a model that cannot be found or read
    │   └── UnsupportedModelError          a readable model that Treadle cannot compute
    ├── MissingPackageError (ImportError)  a part of Treadle whose optional packages are not installed
    ├── Overloaded (RuntimeError)          the queue is full; retry later
    └── EngineError (RuntimeError)         the engine failed while serving
"""


class TreadleError(Exception):
    """Base of every error that Treadle raises on purpose."""


class InvalidRequestError(TreadleError, ValueError):
    """An invalid request. Nothing was queued.

    Attributes:
        field: the argument that is wrong, as the caller spells it.
        problem: what is wrong with it, without the field's name.
        code: OpenAI's code for the problem, where clients look for one.
    """

    def __init__(self, field: str, problem: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.code = code


class ConfigError(TreadleError, ValueError):
    """An invalid engine setting; the message names the field, the value and the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UsageError(TreadleError, ValueError):
    """An option of the command line that cannot work; the message names the option."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")


class ModelLoadError(TreadleError, ValueError):
    """A model that cannot be found or read."""


class UnsupportedModelError(ModelLoadError):
    """A model that Treadle can read but cannot compute."""


class MissingPackageError(TreadleError, ImportError):
    """A part of Treadle whose optional packages are not installed; the message says which extra brings them."""


class Overloaded(TreadleError, RuntimeError):  # noqa: N818 - a state of the engine, not a mistake
    """The queue of waiting requests is full. Nothing was queued.

    Attributes:
        num_queued_requests, num_queued_tokens: current size of the queue.
    """

    def __init__(self, message: str, num_queued_requests: int, num_queued_tokens: int) -> None:
        super().__init__(message)
        self.num_queued_requests = num_queued_requests
        self.num_queued_tokens = num_queued_tokens


class EngineError(TreadleError, RuntimeError):
    """The engine failed while it served a request."""


def cut(text: str, most: int) -> str:
    """`text`, or its first `most` characters and an ellipsis."""
    return text if len(text) <= most else text[:most] + " …"
