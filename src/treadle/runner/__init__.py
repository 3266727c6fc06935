"""Runs a StepPlan on a model: forward pass by torch or the native kernels, KV memory, sampling."""

from treadle.runner.kv_storage import KVStorage
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampler import Sampler

__all__ = ["KVStorage", "ModelRunner", "Sampler"]
