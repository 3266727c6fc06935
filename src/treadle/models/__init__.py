"""Finds models, reads what they are made of and their weights. Needs torch."""

from treadle.models.architecture import Architecture, CheckpointFormat, WeightMap
from treadle.models.gguf_metadata import GGUF_NAMES, GGUFMetadata, spec_from_gguf
from treadle.models.huggingface_config import rope_from_huggingface, spec_from_huggingface, with_sliding_windows
from treadle.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeConfig, repeat_layer

__all__ = [
    "GGUF_NAMES",
    "Architecture",
    "AttentionSpec",
    "CheckpointFormat",
    "GGUFMetadata",
    "LayerSpec",
    "MLPSpec",
    "ModelSpec",
    "NormSpec",
    "RopeConfig",
    "WeightMap",
    "repeat_layer",
    "rope_from_huggingface",
    "spec_from_gguf",
    "spec_from_huggingface",
    "with_sliding_windows",
]
