"""Sources of time: the system clock for a real engine, a virtual clock for simulations and tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock: seconds since some fixed point."""

    def now(self) -> float:
        """The current time in seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed point."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"seconds: a clock cannot go back, got {seconds}")
        self._now += seconds
