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


def test_log_handlers_of_the_program_are_kept(logger, monkeypatch):
    mine = logging.NullHandler()
    monkeypatch.setattr(logger, "handlers", [mine])
    show_logs()
    assert logger.handlers == [mine]


def test_logs_go_to_standard_error_by_default(logger, monkeypatch, capsys):
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setenv("TREADLE_LOG_LEVEL", "warning")
    show_logs()
    show_logs()
    logger.info("not shown")
    logger.warning("shown")
    assert capsys.readouterr().err == "shown\n"


def test_the_error_for_an_unknown_log_level_names_it(logger, monkeypatch):
    monkeypatch.setenv("TREADLE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="TREADLE_LOG_LEVEL: must be one of DEBUG.*got 'LOUD'"):
        show_logs()
