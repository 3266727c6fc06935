"""A recorded run on the toy runner."""

import random

from treadle.core.lora import LoRARequest
from treadle.testing.toy import ToyEngine
from treadle.trace.recorder import StepRecorder


def record_run(path):
    """Record a seeded trace with groups, beams, adapters, swaps and preemptions."""
    rng = random.Random(4)
    engine = ToyEngine(
        num_blocks=20, block_size=4, num_host_blocks=30, max_model_len=60, order="priority",
        max_loras=1, admission_headroom=0,
    )  # fmt: skip
    recorder = StepRecorder(path, engine.scheduler.config, engine.scheduler.cache_config, engine.clock)
    engine.observers.append(recorder)
    for i in range(25):
        adapter = rng.choice([0, 0, 1, 2])
        engine.add(
            f"r{i}", [rng.randrange(50) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 25),
            n=rng.choice([1, 1, 3]), priority=rng.randrange(3),
            params={"use_beam_search": True} if rng.random() < 0.2 else {},
            lora=LoRARequest("x", adapter) if adapter else None,
        )  # fmt: skip
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run()
    recorder.close()
    return engine
