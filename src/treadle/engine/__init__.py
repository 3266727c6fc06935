"""The loop: ask the scheduler, run the step, take the result back. Meets the runner through a protocol."""

from treadle.engine.engine import Engine, OutputProcessor
from treadle.engine.observers import Observer
from treadle.engine.runner import Runner

__all__ = ["Engine", "Observer", "OutputProcessor", "Runner"]
