"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer."""

from dataclasses import replace

from treadle.core.metadata import ModelMetadata
from treadle.models.architecture import Architecture, CheckpointFormat
from treadle.models.huggingface_config import spec_from_huggingface, with_sliding_windows
from treadle.models.spec import ModelSpec

NAME = "SmolLM3ForCausalLM"


def _from_huggingface(config: ModelMetadata) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    spec = spec_from_huggingface(
        NAME, config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=config.flag("mlp_bias", False)
    )
    num_layers = spec.num_hidden_layers
    if config.get("no_rope_layers"):
        rotates = config.integers("no_rope_layers", length=num_layers)
    else:
        interval = config.integer("no_rope_layer_interval", 4)
        rotates = [(i + 1) % interval for i in range(num_layers)]
    layers = [
        layer if rotates[i] else replace(layer, attention=replace(layer.attention, rope=None))
        for i, layer in enumerate(spec.layers)
    ]
    return with_sliding_windows(replace(spec, layers=tuple(layers)), config)


ARCHITECTURE = Architecture(huggingface=CheckpointFormat(name=NAME, spec=_from_huggingface))
