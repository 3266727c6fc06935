"""Writes what every step did to a file: JSON lines, a header and then one record per step.

With the same arrivals on a virtual clock the file is the same to the byte.
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
"""Number of the file format; it grows when a reader of old files would be misled."""


class StepRecorder:
    """Records an engine's steps.

    Args:
        path: the file, written anew.
        config, cache_config: of the scheduler.
        clock: of the engine.

    Attributes:
        wants_details: always.
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
        # An engine has no end of its own: the file is finished with the recorder, or with the program.
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
        """Write a line for the step; what ended before it is told with it."""
        record = self._describer.describe(report, finished)
        if record is not None:
            self._write(record)

    def _write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()
