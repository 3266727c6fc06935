"""Who wants to see steps. With no observer a step pays nothing for them."""

import logging
from collections.abc import Iterable
from typing import Protocol

from treadle.clock import Clock
from treadle.request import Request
from treadle.scheduler import Scheduler, StepPlan

logger = logging.getLogger("treadle")


class StepObserver(Protocol):
    """Sees every step. It must not change what it sees."""

    def on_schedule(self, plan: StepPlan) -> None:
        """A step was planned and is about to run."""
        ...

    def on_update(self, plan: StepPlan, finished: Iterable[Request]) -> None:
        """The step has run; `finished` are the requests that ended with it."""
        ...


class StatsLogger:
    """Logs one line every few seconds: throughput, queues, use of the KV cache.

    Args:
        scheduler: whose cache is reported.
        clock: of the engine.
        interval_s: seconds between lines.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock, interval_s: float) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._interval_s = interval_s
        self._last_line = clock.now()
        self._last_step = clock.now()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0

    def on_schedule(self, plan: StepPlan) -> None:
        """Start counting anew after an idle time."""
        now = self._clock.now()
        if now - self._last_step > self._interval_s:
            self._reset(now)

    def on_update(self, plan: StepPlan, finished: Iterable[Request]) -> None:
        """Count the step, and log when the interval is over."""
        self._num_prompt_tokens += sum(s.count for s in plan.sequences if s.is_prefill)
        self._num_output_tokens += len(plan.decode_rows) + sum(s.num_samples for s in plan.sequences)
        self._num_preemptions += len(plan.preempted)
        now = self._last_step = self._clock.now()
        elapsed = now - self._last_line
        if elapsed < self._interval_s:
            return
        kv = self._scheduler.kv
        hit_rate = kv.num_prefix_hits / kv.num_prefix_queries if kv.num_prefix_queries else 0.0
        logger.info(
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, swapped %d, preempted %d, "
            "KV cache %.1f %%, prefix cache hits %.1f %%",
            self._num_prompt_tokens / elapsed,
            self._num_output_tokens / elapsed,
            len(self._scheduler.batch),
            len(self._scheduler.waiting),
            len(self._scheduler.swapped),
            self._num_preemptions,
            100 * kv.usage,
            100 * hit_rate,
        )
        self._reset(now)

    def _reset(self, now: float) -> None:
        self._last_line = now
        self._num_prompt_tokens = self._num_output_tokens = self._num_preemptions = 0
