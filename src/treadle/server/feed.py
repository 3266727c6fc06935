"""Publishes a record of every step to the clients that follow."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from treadle.core.clock import Clock
from treadle.core.request import Request
from treadle.engine.async_engine import AsyncEngine
from treadle.scheduler import SchedulerSnapshot, StepOutputs, StepReport
from treadle.trace.state_record import describe_state
from treadle.trace.step_record import StepDescriber, StepRecord

MAX_PENDING = 500
"""Maximum backlog of a slow client; beyond it the client gets a new state and the number of missed records."""

HEARTBEAT_S = 1.0
"""Interval of heartbeats to idle clients; also the longest delay they cause at shutdown."""


class _Follower:
    """One client: its backlog."""

    def __init__(self) -> None:
        self.pending: deque[StepRecord] = deque()
        self.num_missed = 0
        self.wake = asyncio.Event()

    def put(self, record: StepRecord) -> None:
        self.pending.append(record)
        if self.num_missed or len(self.pending) > MAX_PENDING:
            # A record holds the changes since the previous one, so it is useless after a gap.
            self.num_missed += len(self.pending)
            self.pending.clear()
        self.wake.set()


class StepFeed:
    """An observer that describes steps while at least one client follows, and costs nothing otherwise.

    Args:
        snapshot: the engine's queues and blocks; called in its thread, between two steps.
        num_blocks: KV blocks of the device tier.
        clock: the engine's clock.
        engine: runs the steps.
    """

    def __init__(
        self, snapshot: Callable[[], SchedulerSnapshot], num_blocks: int, clock: Clock, engine: AsyncEngine
    ) -> None:
        self._snapshot = snapshot
        self._engine = engine
        self._describer = StepDescriber(num_blocks, clock)
        self._followers: set[_Follower] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def wants_details(self) -> bool:
        """Whether somebody follows."""
        return bool(self._followers)

    def on_step(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Hand the step's record to the event loop (in the engine's thread)."""
        if not self._followers or self._loop is None:
            return
        record = self._describer.describe(report, finished)
        if record is not None:
            self._loop.call_soon_threadsafe(self._publish, record)

    def _publish(self, record: StepRecord) -> None:
        for follower in tuple(self._followers):
            follower.put(record)

    async def follow(self, has_ended: Callable[[], bool]) -> AsyncIterator[dict[str, Any] | None]:
        """Yield {"state": …}, then the records of all following steps; None after HEARTBEAT_S without a record.

        A client that falls behind gets {"state": …, "missed": number of records} and continues from there.

        Args:
            has_ended: polled between records; the stream ends when it returns True.

        Raises:
            EngineError: the engine has failed.
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
                    if record["step"] > state["step"]:  # otherwise the state already includes it
                        yield record
                follower.wake.clear()
                try:
                    await asyncio.wait_for(follower.wake.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield None
        finally:
            self._followers.discard(follower)

    def _begin(self, follower: _Follower) -> dict[str, Any]:
        """Register a client from the next step on; returns the state that its first record builds on.

        If other clients follow, the blocks are those of the last record, because the next record holds the changes
        since then.
        """
        snapshot = self._snapshot()
        if not self._followers - {follower}:
            self._describer.catch_up(snapshot.holders)
        self._followers.add(follower)
        return {**describe_state(snapshot), "block_changes": self._describer.blocks.everything()}
