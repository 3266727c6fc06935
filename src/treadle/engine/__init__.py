"""The loop that schedules, executes and updates, over any runner that has the protocol."""

from treadle.engine.engine import Engine, OutputProcessor
from treadle.engine.observers import Observer
from treadle.engine.runner import Runner

__all__ = ["Engine", "Observer", "OutputProcessor", "Runner"]
