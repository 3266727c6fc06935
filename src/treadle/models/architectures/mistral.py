"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer. Its GGUF files call it llama."""

from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat
from treadle.models.huggingface_config import spec_from_huggingface
from treadle.models.spec import ModelSpec

NAME = "MistralForCausalLM"


def _from_huggingface(config: ModelMetadata) -> ModelSpec:
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return spec_from_huggingface(NAME, config, window=window)


ARCHITECTURE = Architecture(huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface))
