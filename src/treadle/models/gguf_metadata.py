"""Reads what most architectures share from the metadata of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.core.errors import UnsupportedModelError
from treadle.models.spec import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeConfig,
    repeat_layer,
)

GGUF_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
"""GGUF's names of the weights, the same for all architectures that have them."""


@dataclass(frozen=True, kw_only=True)
class GGUFMetadata:
    """What a GGUF file says about its model.

    Attributes:
        values: key → value as in the file.
        has_output: whether the file has an output projection of its own.
        rope_divisors: content of the tensor `rope_freqs.weight`, empty if there is none.
    """

    values: Mapping[str, Any]
    has_output: bool
    rope_divisors: tuple[float, ...] = ()


def spec_from_gguf(
    architecture: str, metadata: GGUFMetadata, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelSpec:
    """A spec whose layers are all the same.

    Args:
        architecture: its name.
        metadata: of the file; its keys begin with the file's own name of the architecture.
        qkv_bias, qk_norm: as in AttentionSpec.

    Raises:
        KeyError, TypeError, ArithmeticError, ModelLoadError: something is missing or makes no sense.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    values = metadata.values
    arch = values["general.architecture"]
    if values.get(f"{arch}.expert_count"):
        raise UnsupportedModelError(f"mixtures of experts ({arch}.expert_count) are not supported")
    hidden_size, num_heads = values[f"{arch}.embedding_length"], values[f"{arch}.attention.head_count"]
    head_dim = values.get(f"{arch}.attention.key_length") or hidden_size // num_heads
    rotated = values.get(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(f"rotating {rotated} of {head_dim} head dimensions is not supported")
    scaling = values.get(f"{arch}.rope.scaling.type", "none")
    rope = RopeConfig(
        theta=float(values.get(f"{arch}.rope.freq_base", 10000.0)),
        rope_type="default" if scaling == "none" else scaling,
        factor=float(values.get(f"{arch}.rope.scaling.factor", 1.0)),
        frequency_divisors=metadata.rope_divisors,
    )
    norm = NormSpec(eps=float(values[f"{arch}.attention.layer_norm_rms_epsilon"]))
    layer = LayerSpec(
        norm=norm,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=values.get(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope=rope,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            window=values.get(f"{arch}.attention.sliding_window") or None,
        ),
        mlp=MLPSpec(intermediate_size=values[f"{arch}.feed_forward_length"]),
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=values.get(f"{arch}.vocab_size") or len(values["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        max_position_embeddings=values[f"{arch}.context_length"],
        tie_word_embeddings=not metadata.has_output,
        layers=repeat_layer(layer, values[f"{arch}.block_count"]),
        norm=norm,
    )
