"""Writes every step to a file of JSON lines: a header, then one record per step.

The same arrivals on a virtual clock give the same file, byte for byte.
"""

import json
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

FORMAT = 2
"""Version of the file format; it increases when older readers would misread a new file."""


class StepRecorder:
    """Records an engine's steps.

    Args:
        path: the file; an existing one is overwritten.
        config, cache_config: of the scheduler.
        clock: of the engine.

    Attributes:
        wants_details: always True.
        close: finishes the file.

    Raises:
        ConfigError: the file cannot be written.
    """

    wants_details = True

    def __init__(self, path: Path, config: SchedulerConfig, cache_config: CacheConfig, clock: Clock) -> None:
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("record", f"{path} cannot be written ({error})") from error
        # An engine is never closed, so the file is closed with the recorder or at the end of the program.
        self.close = weakref.finalize(self, self._file.close)
        self._describer = StepDescriber(cache_config.num_blocks, clock)
        self._write(
            {
                "treadle_recording": FORMAT,
                "block_size": cache_config.block_size,
                "num_blocks": cache_config.num_blocks,
                "num_host_blocks": cache_config.num_host_blocks,
                "scheduler": config.to_dict(),
                "wait_reasons": describe_wait_reasons(),
            }
        )

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Write a line for the step; it includes requests that ended before it without a step."""
        record = self._describer.describe(report, finished)
        if record is not None:
            self._write(record)

    def _write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()
