"""Finds models, reads their weights and computes them. Needs torch."""

from treadle.models.config import ModelConfig, RopeConfig
from treadle.models.llama import LlamaModel

__all__ = ["LlamaModel", "ModelConfig", "RopeConfig"]
