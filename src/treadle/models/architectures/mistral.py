"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer. Its GGUF files call it llama."""

from collections.abc import Mapping
from typing import Any

from treadle.models.architecture import Architecture, CheckpointFormat
from treadle.models.huggingface_config import spec_from_huggingface
from treadle.models.spec import ModelSpec

NAME = "MistralForCausalLM"


def _from_huggingface(config: Mapping[str, Any]) -> ModelSpec:
    return spec_from_huggingface(NAME, config, window=config.get("sliding_window"))


ARCHITECTURE = Architecture(huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface))
