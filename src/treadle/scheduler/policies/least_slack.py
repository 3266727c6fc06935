"""The order by slack: the request that can wait the least goes first."""

from typing import Self

from treadle.core.config import SchedulerConfig
from treadle.scheduler.policies.base import MAX_RERANKED, Moment, QueueOrder, RequestView

WEIGHT = 0.1
"""Weight of the latest value in the moving averages."""

MAX_DRIFT = 0.25
"""Keys are computed again when an average has changed by more than this fraction since they were computed."""


class LeastSlack(QueueOrder):
    """The least slack first. The slack is the time until the deadline minus the estimated remaining run time.

    The run time is estimated as a number of steps (those for the prompt, and one for each output token) times the
    average duration of a step. The output length is estimated as the average output length, but at most the
    request's `max_tokens`. Requests without a deadline go last.

    Args:
        max_num_batched_tokens: token budget of a step.
    """

    changes_while_waiting = True

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._step_tokens = max_num_batched_tokens
        self._step_s = 0.0
        self._num_output_tokens = 0.0
        self._asked_with = (0.0, 0.0)
        self._last: Moment | None = None

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return the order with the token budget of `config`."""
        return cls(config.max_num_batched_tokens)

    def key(self, request: RequestView) -> float:
        """Return the latest time, in seconds, at which the request can start and still meet its deadline."""
        done = request.num_output_tokens / request.num_sequences
        longest = self._num_output_tokens if request.max_tokens is None else request.max_tokens
        num_output_tokens = max(min(longest, self._num_output_tokens) - done, 1.0)
        num_prefill_steps = -(-(request.num_prompt_tokens + request.num_output_tokens) // self._step_tokens)
        return request.deadline - (num_prefill_steps + num_output_tokens) * self._step_s

    def is_stale(self, moment: Moment) -> bool:
        """Whether the averages have changed; also measures the duration of the previous step."""
        last, self._last = self._last, moment
        if last is not None and last.num_running:
            self._step_s = _average(self._step_s, moment.now - last.now)
        averages = (self._step_s, self._num_output_tokens)
        has_moved = any(
            abs(now - before) > MAX_DRIFT * before for now, before in zip(averages, self._asked_with, strict=True)
        )
        if not has_moved or moment.num_waiting > MAX_RERANKED:
            return False
        self._asked_with = averages
        return True

    def ended(self, request: RequestView) -> None:
        """Add the request's output to the average output length."""
        if request.num_output_tokens:
            length = request.num_output_tokens / request.num_sequences
            self._num_output_tokens = _average(self._num_output_tokens, length)


def _average(before: float, value: float) -> float:
    return value if not before else before + WEIGHT * (value - before)
