"""Reads a GGUF file: its metadata as config and tokenizer, its tensors under Hugging Face's names."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treadle.errors import ModelLoadError, UnsupportedModelError
from treadle.models.config import ModelConfig, config_from_gguf
from treadle.models.loaders.base import LoadedModel
from treadle.models.loaders.gguf_file import GGUFFile
from treadle.text import ChatTemplate
from treadle.text.gguf_tokenizer import eos_token_ids_from_gguf, tokenizer_from_gguf

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")

# general.sampling.* → SamplingParams.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def load_gguf(path: Path) -> LoadedModel:
    """Open the model in the GGUF file at `path`.

    Raises:
        ModelLoadError: the file is missing, broken or incomplete.
        UnsupportedModelError: a model that is not computed here.
    """
    file = GGUFFile(path)
    metadata = file.metadata
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(_dequantize(file, "rope_freqs.weight").tolist())
    try:
        config = config_from_gguf(metadata, has_output="output.weight" in file.tensors, rope_divisors=divisors)
        tokenizer = tokenizer_from_gguf(metadata)
    except ModelLoadError as error:
        raise type(error)(f"{path}: {error}") from error
    source = metadata.get("tokenizer.chat_template")
    template = None
    if source:
        template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return LoadedModel(
        config=config,
        weights=GGUFWeights(file, config),
        tokenizer=tokenizer,
        chat_template=template,
        eos_token_ids=eos_token_ids_from_gguf(metadata),
        sampling_defaults=_sampling_defaults(metadata),
    )


class GGUFWeights:
    """The tensors of a GGUF file, decoded to floats one at a time.

    Args:
        file: the open file.
        config: of the model.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        # Files of the architecture "llama" store queries and keys for a rotation of neighbours.
        self._is_permuted = file.metadata["general.architecture"] == "llama"

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`; ModelLoadError if it is missing or has another shape."""
        gguf_name = _gguf_name(name)
        values = _dequantize(self._file, gguf_name)
        if values.shape != shape:
            raise ModelLoadError(f"{self._file.path}: {gguf_name} has shape {values.shape}, the config needs {shape}")
        tensor = torch.from_numpy(values).to(dtype)
        if self._is_permuted and ".q_proj." in name:
            return _rotate_halves(tensor, self._config.num_attention_heads)
        if self._is_permuted and ".k_proj." in name:
            return _rotate_halves(tensor, self._config.num_key_value_heads)
        return tensor


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _rotate_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder rows from pairs of neighbours (2i, 2i + 1) to pairs of halves (i, i + head_dim / 2).

    Args:
        tensor: [num_heads × head_dim, …].
        num_heads: heads in the first dimension.
    """
    head_dim = tensor.shape[0] // num_heads
    pairs = tensor.view(num_heads, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _dequantize(file: GGUFFile, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor as float32 in torch's shape."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    info = file.tensors.get(name)
    if info is None:
        raise ModelLoadError(f"{file.path}: the weights lack {name}")
    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{file.path}: {name} is quantized as {kind.name if kind else info.type_id}; supported are "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    block_size, bytes_per_block = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block_size:
        raise ModelLoadError(f"{file.path}: {name} has shape {info.shape}, not in blocks of {block_size}")
    num_bytes = math.prod(info.shape) // block_size * bytes_per_block
    raw = file.raw(info, num_bytes).reshape(*info.shape[:-1], -1)
    if kind is GGMLQuantizationType.F32:
        return raw.view(np.float32).copy()
    values: np.ndarray[Any, np.dtype[np.float32]] = quants.dequantize(raw, kind)
    return values.astype(np.float32, copy=False)


def _sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
