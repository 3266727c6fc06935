import logging

import pytest

from treadle.core.errors import ConfigError
from treadle.core.logs import show_logs


@pytest.fixture
def logger(monkeypatch):
    logger = logging.getLogger("treadle")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    return logger


def test_a_program_that_handles_logs_keeps_them(logger, monkeypatch):
    mine = logging.NullHandler()
    monkeypatch.setattr(logger, "handlers", [mine])
    show_logs()
    assert logger.handlers == [mine]


def test_otherwise_they_go_to_standard_error(logger, monkeypatch, capsys):
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setenv("TREADLE_LOG_LEVEL", "warning")
    show_logs()
    show_logs()
    logger.info("not shown")
    logger.warning("shown")
    assert capsys.readouterr().err == "shown\n"


def test_an_unknown_level_is_named(logger, monkeypatch):
    monkeypatch.setenv("TREADLE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="TREADLE_LOG_LEVEL: must be one of DEBUG.*got 'LOUD'"):
        show_logs()
