"""The accumulated changes of the block map, compared with all block tables in every step."""

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from support.block_maps import apply, plain_look, spread
from support.examples import examples
from treadle.testing.toy import ToyEngine
from treadle.trace.block_map import BlockMap, runs


class Watcher:
    """Applies the changes of every step, and compares the result with the block tables and with the full map."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.map = BlockMap(scheduler.kv.pool.num_blocks)
        self.blocks = dict.fromkeys(range(scheduler.kv.pool.num_blocks), "free")

    def look(self, report):
        apply(self.blocks, self.map.changes(report.details.holders))
        assert self.blocks == plain_look(self.scheduler)
        late = dict.fromkeys(self.blocks, "free")
        apply(late, self.map.everything())
        assert late == self.blocks


@examples(60)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(["auto", "recompute", "swap"]))
def test_accumulated_changes_equal_the_block_tables(seed, mode):
    rng = random.Random(seed)
    engine = ToyEngine(
        num_blocks=20, block_size=4, num_host_blocks=30, max_model_len=60, admission_headroom=0, preemption_mode=mode
    )
    engine.on_planned.append(Watcher(engine.scheduler).look)
    beginning = [rng.randrange(50) for _ in range(12)]
    for i in range(20):
        prompt = beginning[: rng.choice([0, 8, 12])] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        engine.add(
            f"r{i}", prompt, rng.randrange(1, 25), n=rng.choice([1, 1, 3]),
            params={"use_beam_search": True} if rng.random() < 0.2 else {},
        )  # fmt: skip
        for _ in range(rng.randrange(3)):
            engine.step()
        if rng.random() < 0.2:
            engine.scheduler.abort(f"r{rng.randrange(i + 1)}")
    engine.run()


@given(st.sets(st.integers(0, 60)))
def test_block_numbers_are_encoded_as_runs(numbers):
    assert spread(runs(np.array(sorted(numbers), dtype=np.int32))) == sorted(numbers)
