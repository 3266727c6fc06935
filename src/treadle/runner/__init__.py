"""Runs a StepPlan on a backend: rows, flattening, sampling. It knows about sequences only what plans say."""

from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampler import Sampler

__all__ = ["ModelRunner", "Sampler"]
