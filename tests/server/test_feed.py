"""The stream of steps: complete for every client, wherever it starts and even if it falls behind."""

import asyncio

from support.block_maps import apply, plain_look
from treadle.server.feed import MAX_PENDING, StepFeed
from treadle.testing.toy import ToyEngine


class BetweenSteps:
    """Stands in for the engine's thread: steps run only when the test calls for them."""

    async def call(self, function):
        return function()


class Reader:
    """Tracks what a page would: the holder of each block, the steps seen, the number missed."""

    def __init__(self, feed):
        self.events = feed.follow(lambda: False)
        self.blocks, self.steps, self.num_missed, self.arrived = {}, [], 0, set()

    async def read(self, num_blocks):
        """Read all pending events."""
        while True:
            event = await anext(self.events)
            if event is None:
                return
            if "state" in event:
                self.num_missed += event.get("missed", 0)
                self.blocks = dict.fromkeys(range(num_blocks), "free")
                event = event["state"]
                self.arrived |= {r["id"] for queue in ("waiting", "running", "swapped") for r in event[queue]}
            else:
                self.steps.append(event["step"])
                self.arrived |= set(event["arrived"])
            apply(self.blocks, event["block_changes"])


def test_clients_join_fall_behind_and_catch_up(monkeypatch):
    monkeypatch.setattr("treadle.server.feed.HEARTBEAT_S", 0.01)
    engine = ToyEngine(num_blocks=30, block_size=4, max_model_len=100, admission_headroom=0)
    scheduler = engine.scheduler
    feed = StepFeed(scheduler.snapshot, 30, engine.clock, BetweenSteps())
    engine.observers.append(feed)
    at_last_plan = {}

    engine.on_planned.append(lambda report: at_last_plan.update(plain_look(scheduler)))
    names = set()

    def run(count):
        for _ in range(count):
            if scheduler.num_unfinished_requests < 6:
                names.add(f"r{len(names)}")
                engine.add(f"r{len(names) - 1}", [len(names) % 50] * 9, 30)
            engine.step()

    async def scenario():
        run(20)  # nobody watches
        early = Reader(feed)
        await early.read(30)
        run(30)
        late = Reader(feed)
        await late.read(30)
        await early.read(30)
        run(30)
        for reader in (early, late):
            await reader.read(30)
            assert reader.blocks == at_last_plan
            assert reader.num_missed == 0
        assert early.steps == list(range(21, 81))
        assert late.steps == list(range(51, 81))
        # One client keeps reading, the other pauses.
        for _ in range(3):
            run(MAX_PENDING // 2)
            await early.read(30)
        run(5)
        for reader in (early, late):
            await reader.read(30)
            assert reader.arrived >= {r.request_id for r in scheduler.unfinished_requests()}
        last = scheduler.num_steps
        assert early.steps == list(range(21, last + 1))
        assert early.num_missed == 0
        assert 80 + late.num_missed == last
        run(10)
        for reader in (early, late):
            await reader.read(30)
            assert reader.blocks == at_last_plan
        assert late.steps[-10:] == list(range(last + 1, last + 11))
        for reader in (early, late):
            await reader.events.aclose()
        assert not feed._followers

    asyncio.run(scenario())
