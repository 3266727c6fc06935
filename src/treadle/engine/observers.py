"""Observers of steps. They cost nothing when there are none."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from treadle.core.clock import Clock
from treadle.core.request import Request
from treadle.scheduler import SchedulerStats, StepOutputs, StepReport

logger = logging.getLogger("treadle")


class Observer(Protocol):
    """Is notified of every step. It must not change its arguments; one that raises is logged once and removed.

    If it has an attribute `wants_details` that is true, reports have details.
    """

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Called after a step, and when requests have ended without one.

        Args:
            report: how the step was planned; None if there was no step.
            outputs: what it changed; None if there was no step or it failed.
            finished: requests that ended since the previous call.
        """
        ...


class StatsLogger:
    """Logs one line every few seconds: throughput, queues, use of the KV cache.

    Args:
        stats: the engine's statistics.
        clock: the engine's clock.
        interval_s: seconds between lines.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], clock: Clock, interval_s: float) -> None:
        self._stats = stats
        self._clock = clock
        self._interval_s = interval_s
        self._last_line = clock.now()
        self._last_step = clock.now()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Count the step, and log if the interval has passed."""
        if report is None:
            return
        if report.time - self._last_step > self._interval_s:
            self._reset(report.time)  # start anew after an idle time
        if outputs is not None:
            self._num_prompt_tokens += outputs.num_prompt_tokens + outputs.num_recomputed_tokens
            self._num_output_tokens += outputs.num_generated_tokens
        self._num_preemptions += len(report.preempted)
        now = self._last_step = self._clock.now()
        elapsed = now - self._last_line
        if elapsed < self._interval_s:
            return
        stats = self._stats()
        hit_rate = stats.num_prefix_hits / stats.num_prefix_queries if stats.num_prefix_queries else 0.0
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, swapped %d, preempted %d, "
            "KV cache %.1f %%, prefix cache hits %.1f %%",
            self._num_prompt_tokens / elapsed,
            self._num_output_tokens / elapsed,
            stats.num_running_sequences,
            stats.num_waiting_requests,
            stats.num_swapped_requests,
            self._num_preemptions,
            100 * stats.kv_cache_usage,
            100 * hit_rate,
        )
        self._reset(now)

    def _reset(self, now: float) -> None:
        self._last_line = now
        self._num_prompt_tokens = self._num_output_tokens = self._num_preemptions = 0
