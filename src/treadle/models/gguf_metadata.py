"""Reads what most architectures share from the metadata of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.core.errors import UnsupportedModelError
from treadle.core.metadata import ModelMetadata
from treadle.models.spec import (
    MAX_LAYERS,
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

    values: ModelMetadata
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
        ModelLoadError: a value is missing or invalid.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    values = metadata.values
    arch = values.text("general.architecture")
    if values.integer(f"{arch}.expert_count", 0, minimum=0):
        raise UnsupportedModelError(f"mixtures of experts ({arch}.expert_count) are not supported")
    hidden_size = values.integer(f"{arch}.embedding_length")
    num_heads = values.integer(f"{arch}.attention.head_count")
    head_dim = values.integer(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
    rotated = values.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(f"rotating {rotated} of {head_dim} head dimensions is not supported")
    scaling = values.text(f"{arch}.rope.scaling.type", "none")
    rope = RopeConfig(
        theta=values.number(f"{arch}.rope.freq_base", 10000.0),
        rope_type="default" if scaling == "none" else scaling,
        factor=values.number(f"{arch}.rope.scaling.factor", 1.0) or 1.0,  # 0 also means none
        frequency_divisors=metadata.rope_divisors,
    )
    norm = NormSpec(eps=values.number(f"{arch}.attention.layer_norm_rms_epsilon", above=0.0))
    window = values.integer(f"{arch}.attention.sliding_window", 0, minimum=0)
    layer = LayerSpec(
        norm=norm,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=values.integer(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope=rope,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            window=window or None,
        ),
        mlp=MLPSpec(intermediate_size=values.integer(f"{arch}.feed_forward_length")),
    )
    vocab_size = f"{arch}.vocab_size"
    return ModelSpec(
        architecture=architecture,
        vocab_size=values.integer(vocab_size)
        if values.has(vocab_size)
        else len(values.texts("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        max_position_embeddings=values.integer(f"{arch}.context_length"),
        tie_word_embeddings=not metadata.has_output,
        layers=repeat_layer(layer, values.integer(f"{arch}.block_count", maximum=MAX_LAYERS)),
        norm=norm,
    )
