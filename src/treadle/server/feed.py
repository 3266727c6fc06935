"""Shows every step to whoever asks, as it happens."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from treadle.clock import Clock
from treadle.engine.async_engine import AsyncEngine
from treadle.engine.state_record import describe_state
from treadle.engine.step_record import StepDescriber, StepRecord
from treadle.request import Request
from treadle.scheduler import Scheduler, StepOutputs, StepReport

MAX_PENDING = 500
"""Records that wait for a slow reader; instead of more it gets the state anew, and is told how many it missed."""

HEARTBEAT_S = 1.0
"""A reader hears something this often, and a server that stops waits no longer for it."""


class _Follower:
    """One reader: what waits for it."""

    def __init__(self) -> None:
        self.pending: deque[StepRecord] = deque()
        self.num_missed = 0
        self.wake = asyncio.Event()

    def put(self, record: StepRecord) -> None:
        self.pending.append(record)
        if self.num_missed or len(self.pending) > MAX_PENDING:
            # A record tells what has changed since the one before: with one missing, the others say nothing.
            self.num_missed += len(self.pending)
            self.pending.clear()
        self.wake.set()


class StepFeed:
    """An observer that describes steps while somebody follows, and costs nothing otherwise.

    Args:
        scheduler: of the engine.
        clock: of the engine.
        engine: runs the steps.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock, engine: AsyncEngine) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._engine = engine
        self._describer = StepDescriber(scheduler, clock)
        self._followers: set[_Follower] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: list[Request] = []

    @property
    def wants_details(self) -> bool:
        """Whether somebody follows."""
        return bool(self._followers)

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Hand the step's record to the event loop (in the engine's thread)."""
        if not self._followers or self._loop is None:
            self._finished = []
            return
        self._finished += finished
        if report is not None and report.details is not None:
            self._loop.call_soon_threadsafe(self._publish, self._describer.describe(report, self._finished))
            self._finished = []

    def _publish(self, record: StepRecord) -> None:
        for follower in tuple(self._followers):
            follower.put(record)

    async def follow(self, has_ended: Callable[[], bool]) -> AsyncIterator[dict[str, Any] | None]:
        """First {"state": …}, then the records of all further steps; None when there was nothing for a while.

        A reader that lags gets {"state": …, "missed": number of records} again, and goes on from there.

        Args:
            has_ended: asked between records.

        Raises:
            EngineError: the engine is dead.
        """
        self._loop = asyncio.get_running_loop()
        follower = _Follower()
        try:
            state = await self._engine.call(lambda: self._begin(follower))
            yield {"state": state}
            while not has_ended():
                if follower.num_missed:
                    num_missed, follower.num_missed = follower.num_missed, 0
                    state = await self._engine.call(lambda: self._begin(follower))
                    yield {"state": state, "missed": num_missed}
                while follower.pending:
                    record = follower.pending.popleft()
                    if record["step"] > state["step"]:  # else it was on its way when the state was taken
                        yield record
                follower.wake.clear()
                try:
                    await asyncio.wait_for(follower.wake.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield None
        finally:
            self._followers.discard(follower)

    def _begin(self, follower: _Follower) -> dict[str, Any]:
        """Let a reader follow from the next step on; returns the state that its first record changes.

        The blocks are those of the last record if somebody else follows: the next one tells changes since then.
        """
        if not self._followers - {follower}:
            self._describer.catch_up()
        self._followers.add(follower)
        state = describe_state(self._scheduler, self._clock.now())
        return {**state, "block_changes": self._describer.blocks.everything()}
