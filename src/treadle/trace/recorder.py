"""Writes every step to a file of JSON lines: a header, then one record per step.

The same arrivals on a virtual clock give the same file, byte for byte.
"""

import contextlib
import json
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from treadle.core.clock import Clock
from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.errors import ConfigError
from treadle.core.request import Request
from treadle.scheduler import StepOutputs, StepReport
from treadle.trace.step_record import StepDescriber, StepRecord, describe_wait_reasons

logger = logging.getLogger("treadle")

FORMAT = 2
"""Version of the file format; it increases when older readers would misread a new file."""


class StepRecorder:
    """Records an engine's steps.

    Args:
        path: the file; an existing one is overwritten.
        config, cache_config: of the scheduler.
        clock: of the engine.

    Attributes:
        wants_details: True until the file can no longer be written; recording then ends with a warning.
        close: finishes the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, config: SchedulerConfig, cache_config: CacheConfig, clock: Clock) -> None:
        self.wants_details = True
        self._path = path
        self._describer = StepDescriber(cache_config.num_blocks, clock)
        header = {
            "treadle_recording": FORMAT,
            "block_size": cache_config.block_size,
            "num_blocks": cache_config.num_blocks,
            "num_host_blocks": cache_config.num_host_blocks,
            "scheduler": config.to_dict(),
            "wait_reasons": describe_wait_reasons(),
        }
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
            # An engine is never closed, so the file is closed with the recorder or at the end of the program.
            self.close = weakref.finalize(self, _close, self._file)
            self._write(header)
        except OSError as error:
            raise ConfigError(
                "record", f"{path} cannot be written ({error}); give a path that can be written, with free space"
            ) from error

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Write a line for the step; it includes requests that ended before it without a step."""
        if not self.wants_details:
            return
        record = self._describer.describe(report, finished)
        if record is None:
            return
        try:
            self._write(record)
        except OSError as error:
            logger.warning("recording has ended: %s cannot be written (%s)", self._path, error)
            self.wants_details = False
            self.close()

    def _write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # closing tries again to write what could not be written
        file.close()
