"""Qwen3 (Yang et al. 2025), dense: queries and keys are normalized per head; some layers may have a window."""

from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat, WeightMap
from treadle.models.gguf_metadata import GGUF_NAMES, GGUFMetadata, spec_from_gguf
from treadle.models.huggingface_config import spec_from_huggingface, with_sliding_windows
from treadle.models.spec import ModelSpec

NAME = "Qwen3ForCausalLM"


def _from_huggingface(config: ModelMetadata) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    spec = spec_from_huggingface(NAME, config, qkv_bias=has_bias, o_bias=has_bias, qk_norm=True)
    return with_sliding_windows(spec, config)


def _from_gguf(metadata: GGUFMetadata) -> ModelSpec:
    return spec_from_gguf(NAME, metadata, qk_norm=True)


ARCHITECTURE = Architecture(
    huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface),
    gguf=CheckpointFormat(name="qwen3", spec=_from_gguf, weights=WeightMap(names=GGUF_NAMES)),
)
