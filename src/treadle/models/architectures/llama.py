"""Llama (Touvron et al. 2023), and what has its shape: SmolLM2, and Mistral in GGUF files."""

import torch

from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat, WeightMap
from treadle.models.gguf_metadata import GGUF_NAMES, GGUFMetadata, spec_from_gguf
from treadle.models.huggingface_config import spec_from_huggingface
from treadle.models.spec import ModelSpec

NAME = "LlamaForCausalLM"


def _from_huggingface(config: ModelMetadata) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    return spec_from_huggingface(
        NAME, config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=config.flag("mlp_bias", False)
    )


def _from_gguf(metadata: GGUFMetadata) -> ModelSpec:
    return spec_from_gguf(NAME, metadata)


def _rotate_halves(name: str, tensor: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Reorders the rows of queries and keys: GGUF files store them for a rotation of neighbouring pairs (2i, 2i + 1),
    the forward passes rotate the pairs (i, i + head_dim / 2)."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    pairs = tensor.view(-1, spec.head_dim // 2, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, …]
    return pairs.transpose(1, 2).reshape(tensor.shape)


ARCHITECTURE = Architecture(
    huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface),
    gguf=CheckpointFormat(name="llama", spec=_from_gguf, weights=WeightMap(names=GGUF_NAMES, convert=_rotate_halves)),
)
