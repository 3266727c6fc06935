"""Runs a StepPlan on a backend: rows, flattening, sampling. Knows of sequences only what plans tell."""

from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampler import Sampler

__all__ = ["ModelRunner", "Sampler"]
