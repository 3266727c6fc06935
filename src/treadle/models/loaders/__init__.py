"""Readers of model files. Each gives a LoadedModel: config, weights by Hugging Face's names, tokenizer."""

from treadle.models.loaders.base import LoadedModel, WeightSource
from treadle.models.loaders.gguf import load_gguf
from treadle.models.loaders.huggingface import load_huggingface

__all__ = ["LoadedModel", "WeightSource", "load_gguf", "load_huggingface"]
