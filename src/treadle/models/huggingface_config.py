"""Reads what most architectures share from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import replace
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
        KeyError, TypeError, ArithmeticError, ModelLoadError: something is missing or makes no sense.
        UnsupportedModelError: a variant that a spec cannot express.
    """
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    norm = NormSpec(eps=float(config["rms_norm_eps"]))
    activation = config.get("hidden_act", "silu")
    layer = LayerSpec(
        norm=norm,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            rope=rope_from_huggingface(config),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            window=window,
        ),
        mlp=MLPSpec(
            intermediate_size=config["intermediate_size"],
            activation="silu" if activation == "swish" else activation,
            bias=mlp_bias,
        ),
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        layers=repeat_layer(layer, config["num_hidden_layers"]),
        norm=norm,
    )


def rope_from_huggingface(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding that a config.json describes, one for all layers."""
    # transformers 5 writes rope_parameters; before it there were rope_theta and rope_scaling.
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(f"rope parameters per kind of layer ({', '.join(nested)}) are not supported")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise UnsupportedModelError("rotating a part of the head (partial_rotary_factor) is not supported")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_type=rope_type,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(original),
    )


def with_sliding_windows(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """`spec` with the window in those layers that config.json gives one: as `layer_types` says, or, without it,
    the layers from `max_window_layers` on if `use_sliding_window` is set."""
    window = config.get("sliding_window")
    if window is None:
        return spec
    kinds = config.get("layer_types")
    if kinds:
        has_window = [kind == "sliding_attention" for kind in kinds]
    else:
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else spec.num_hidden_layers
        has_window = [i >= first for i in range(spec.num_hidden_layers)]
    if len(has_window) != spec.num_hidden_layers:
        raise TypeError(f"layer_types has {len(has_window)} entries for {spec.num_hidden_layers} layers")
    layers = [
        replace(layer, attention=replace(layer.attention, window=window if windowed else None))
        for layer, windowed in zip(spec.layers, has_window, strict=True)
    ]
    return replace(spec, layers=tuple(layers))
