"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on queries, keys and values; some layers may have a window."""

from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat, WeightMap
from treadle.models.gguf_metadata import GGUF_NAMES, GGUFMetadata, spec_from_gguf
from treadle.models.huggingface_config import spec_from_huggingface, with_sliding_windows
from treadle.models.spec import ModelSpec

NAME = "Qwen2ForCausalLM"


def _from_huggingface(config: ModelMetadata) -> ModelSpec:
    return with_sliding_windows(spec_from_huggingface(NAME, config, qkv_bias=True), config)


def _from_gguf(metadata: GGUFMetadata) -> ModelSpec:
    return spec_from_gguf(NAME, metadata, qkv_bias=True)


ARCHITECTURE = Architecture(
    huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface),
    gguf=CheckpointFormat(name="qwen2", spec=_from_gguf, weights=WeightMap(names=GGUF_NAMES)),
)
