"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treadle.models.architecture import Architecture, CheckpointFormat
from treadle.models.huggingface_config import spec_from_huggingface, with_sliding_windows
from treadle.models.spec import ModelSpec

NAME = "SmolLM3ForCausalLM"


def _from_huggingface(config: Mapping[str, Any]) -> ModelSpec:
    has_bias = bool(config.get("attention_bias", False))
    spec = spec_from_huggingface(
        NAME, config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=bool(config.get("mlp_bias", False))
    )
    interval = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(i + 1) % interval for i in range(spec.num_hidden_layers)]
    if len(rotates) < spec.num_hidden_layers:
        raise TypeError(f"no_rope_layers has {len(rotates)} entries for {spec.num_hidden_layers} layers")
    layers = [
        layer if rotates[i] else replace(layer, attention=replace(layer.attention, rope=None))
        for i, layer in enumerate(spec.layers)
    ]
    return with_sliding_windows(replace(spec, layers=tuple(layers)), config)


ARCHITECTURE = Architecture(huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface))
