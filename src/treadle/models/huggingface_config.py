"""Reads what most architectures share from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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


def spec_from_huggingface(
    architecture: str,
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
    window: int | None = None,
) -> ModelSpec:
    """A spec whose layers are all the same.

    Args:
        architecture: its name.
        config: content of config.json.
        qkv_bias, o_bias, qk_norm, mlp_bias, window: as in AttentionSpec and MLPSpec.

    Raises:
        ModelLoadError: a value is missing or invalid.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    config = ModelMetadata.of(config, "config.json")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    norm = NormSpec(eps=config.number("rms_norm_eps", above=0.0))
    activation = config.text("hidden_act", "silu")
    layer = LayerSpec(
        norm=norm,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", max(1, hidden_size // num_heads)),
            rope=rope_from_huggingface(config),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            window=window,
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("intermediate_size"),
            activation="silu" if activation == "swish" else activation,
            bias=mlp_bias,
        ),
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        layers=repeat_layer(layer, config.integer("num_hidden_layers", maximum=MAX_LAYERS)),
        norm=norm,
    )


def rope_from_huggingface(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding that a config.json describes, the same for all layers."""
    config = ModelMetadata.of(config, "config.json")
    # transformers 5 writes rope_parameters; before it there were rope_theta and rope_scaling.
    parameters = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(f"rope parameters per kind of layer ({', '.join(nested)}) are not supported")
    rotated = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError("rotating a part of the head (partial_rotary_factor) is not supported")
    return RopeConfig(
        theta=parameters.number("rope_theta", config.number("rope_theta", 10000.0)),
        rope_type=parameters.text("rope_type", parameters.text("type", "default")),
        factor=parameters.number("factor", 1.0),
        low_freq_factor=parameters.number("low_freq_factor", 1.0),
        high_freq_factor=parameters.number("high_freq_factor", 4.0),
        original_max_position_embeddings=parameters.integer(
            "original_max_position_embeddings", config.integer("max_position_embeddings")
        ),
    )


def with_sliding_windows(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """`spec` with a window in those layers to which config.json gives one: those that `layer_types` lists or, without
    it, the layers from `max_window_layers` on if `use_sliding_window` is set."""
    config = ModelMetadata.of(config, "config.json")
    if not config.has("sliding_window"):
        return spec
    window, num_layers = config.integer("sliding_window"), spec.num_hidden_layers
    if config.get("layer_types"):
        kinds = config.texts("layer_types", length=num_layers)
        has_window = [kind == "sliding_attention" for kind in kinds]
    else:
        uses_windows = config.flag("use_sliding_window", False)
        first = config.integer("max_window_layers", 0, minimum=0) if uses_windows else num_layers
        has_window = [i >= first for i in range(num_layers)]
    layers = [
        replace(layer, attention=replace(layer.attention, window=window if windowed else None))
        for layer, windowed in zip(spec.layers, has_window, strict=True)
    ]
    return replace(spec, layers=tuple(layers))
