"""The errors that Treadle raises.

::

    TreadleError
    ├── InvalidRequestError (ValueError)   a request that cannot be served; names field, value and limit
    ├── ConfigError (ValueError)           an engine setting that cannot work
    ├── ModelLoadError (ValueError)        a model that cannot be found or read
    │   └── UnsupportedModelError          readable, but not something Treadle computes
    └── EngineError (RuntimeError)         the engine failed while serving
"""


class TreadleError(Exception):
    """Base of every error that Treadle raises on purpose."""


class InvalidRequestError(TreadleError, ValueError):
    """A request that cannot be served as it stands. Nothing was queued.

    Attributes:
        field: the argument that is wrong, as the caller spells it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ConfigError(TreadleError, ValueError):
    """An engine setting that cannot work; the message names the field, the value and the limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelLoadError(TreadleError, ValueError):
    """A model that cannot be found or read."""


class UnsupportedModelError(ModelLoadError):
    """A model that Treadle can read but does not know how to compute."""


class EngineError(TreadleError, RuntimeError):
    """The engine failed while it served a request."""
