"""Shows every step to whoever asks, as it happens."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from treadle.clock import Clock
from treadle.engine.step_record import StepDescriber, StepRecord
from treadle.request import Request
from treadle.scheduler import Scheduler, StepPlan

MAX_PENDING = 500
"""Records that wait for a slow reader; of more, the oldest are dropped, and the next one says how many."""

HEARTBEAT_S = 5.0


class _Follower:
    """One reader: what waits for it."""

    def __init__(self) -> None:
        self.pending: deque[StepRecord] = deque()
        self.num_missed = 0
        self.wake = asyncio.Event()

    def put(self, record: StepRecord) -> None:
        if len(self.pending) >= MAX_PENDING:
            self.pending.popleft()
            self.num_missed += 1
        self.pending.append(record)
        self.wake.set()


class StepFeed:
    """An observer that describes steps while somebody follows, and costs nothing otherwise.

    Args:
        scheduler: of the engine.
        clock: of the engine.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._describer = StepDescriber(scheduler, clock)
        self._followers: set[_Follower] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._describes = False

    def on_schedule(self, plan: StepPlan) -> None:
        """Describe the step before it runs (in the engine's thread)."""
        self._describes = bool(self._followers)
        if self._describes:
            self._describer.begin(plan)

    def on_update(self, plan: StepPlan, finished: Iterable[Request]) -> None:
        """Hand the record to the event loop."""
        if self._describes and self._loop is not None:
            self._loop.call_soon_threadsafe(self._publish, self._describer.end(finished))

    def _publish(self, record: StepRecord) -> None:
        for follower in self._followers:
            follower.put(record)

    async def follow(self, has_ended: Callable[[], bool]) -> AsyncIterator[StepRecord | None]:
        """Records from now on; None when there was nothing for a while.

        Args:
            has_ended: asked between records.
        """
        self._loop = asyncio.get_running_loop()
        follower = _Follower()
        self._followers.add(follower)
        try:
            while not has_ended():
                while follower.pending:
                    record = follower.pending.popleft()
                    if follower.num_missed:
                        record = {**record, "missed": follower.num_missed}
                        follower.num_missed = 0
                    yield record
                follower.wake.clear()
                try:
                    await asyncio.wait_for(follower.wake.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield None
        finally:
            self._followers.discard(follower)
