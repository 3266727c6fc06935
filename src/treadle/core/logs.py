"""Sends Treadle's log lines to standard error, unless the program has set up logging itself."""

import logging
import os

from treadle.core.errors import ConfigError

LEVEL_VARIABLE = "TREADLE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def show_logs(level: str | None = None) -> None:
    """Print Treadle's log lines to standard error, if no handler is installed yet.

    Args:
        level: the lowest level to show; if None, TREADLE_LOG_LEVEL from the environment, or INFO.

    Raises:
        ConfigError: TREADLE_LOG_LEVEL is not a level.
    """
    level = level or os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(LEVEL_VARIABLE, f"must be one of {', '.join(LEVELS)}; got {level!r}")
    logger = logging.getLogger("treadle")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
