"""Model specs: values that a spec refuses, and specs that a forward pass refuses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from support.native import RUNNABLE, native_library
from treadle.backends.cpu.model import NativeModel, why_not_native
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models import (
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeConfig,
    repeat_layer,
    spec_from_huggingface,
    with_sliding_windows,
)

LAYER = LayerSpec(
    norm=NormSpec(eps=1e-5),
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig()),
    mlp=MLPSpec(intermediate_size=8),
)


def spec_of(*layers):
    return ModelSpec(
        architecture="LoomForCausalLM", vocab_size=10, hidden_size=8, max_position_embeddings=16,
        tie_word_embeddings=True, layers=layers, norm=NormSpec(eps=1e-5),
    )  # fmt: skip


def attention(**changes):
    return replace(LAYER, attention=replace(LAYER.attention, **changes))


def mlp(**changes):
    return replace(LAYER, mlp=replace(LAYER.mlp, **changes))


def norm(**changes):
    return replace(LAYER, norm=replace(LAYER.norm, **changes))


class NoWeights:
    def get(self, name, shape, dtype):
        raise AssertionError(f"{name} was read of a model that cannot be computed")


def torch_pass(spec):
    return TorchModel(spec, NoWeights(), dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)


def native_pass(spec):
    return NativeModel(spec, NoWeights(), library=native_library(), weight_format="bfloat16", max_model_len=16)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (attention(kind="latent"), "layer 1: attention.kind 'latent' is not supported; supported: grouped-query"),
        (norm(kind="layer"), "layer 1: norm.kind 'layer'"),
        (mlp(kind="experts"), "layer 1: mlp.kind 'experts'"),
        (mlp(activation="gelu"), "layer 1: mlp.activation 'gelu' is not supported; supported: silu"),
    ],
)
@pytest.mark.parametrize("forward_pass", [torch_pass, native_pass])
def test_unsupported_layers_are_refused_before_weights_are_read(forward_pass, layer, message):
    with pytest.raises(UnsupportedModelError, match=message):
        forward_pass(spec_of(LAYER, layer))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (attention(num_heads=6), r"layers 0 and 1 differ in attention.num_heads \(4 and 6\)"),
        (mlp(intermediate_size=12), r"layers 0 and 1 differ in mlp.intermediate_size \(8 and 12\)"),
        (norm(eps=1e-6), "layers 0 and 1 differ in norm.eps"),
    ],
)
def test_layers_supported_only_by_torch(layer, message):
    spec = spec_of(LAYER, layer)
    assert message.replace("\\", "") in why_not_native(spec)
    if RUNNABLE:
        with pytest.raises(UnsupportedModelError, match=message):
            native_pass(spec)


class RandomWeights:
    """Random weights that depend on the name only. Those of layer 1's MLP are padded with zeros to the given shape."""

    def get(self, name, shape, dtype):
        own = tuple(min(n, 12) for n in shape) if ".1.mlp." in name else shape
        tensor = torch.zeros(shape, dtype=dtype)
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        tensor[tuple(map(slice, own))] = torch.randn(own, generator=generator)
        return tensor


def test_torch_computes_layers_of_different_sizes():
    """A layer with a small intermediate size is equal to a larger one whose additional weights are zero."""

    def causal(layer, q, k, v):
        keys, values = k.view(len(k), 2, 8), v.view(len(v), 2, 8)
        q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    hidden = []
    for layers in ((mlp(intermediate_size=20), mlp(intermediate_size=12)), (mlp(intermediate_size=20),) * 2):
        model = TorchModel(
            spec_of(*layers), RandomWeights(), dtype=torch.float32, device=torch.device("cpu"), max_model_len=16
        )
        tokens = torch.arange(6)
        hidden.append(model.forward(tokens, tokens, causal))
    assert torch.allclose(hidden[0], hidden[1], atol=1e-5)


def test_the_kernels_refuse_unsupported_sizes():
    assert "65 query heads (attention.num_heads) share a KV head" in why_not_native(spec_of(attention(num_heads=130)))
    assert "attention.head_dim is 320" in why_not_native(spec_of(attention(head_dim=320)))
    assert why_not_native(spec_of(attention(num_heads=128))) is None
    assert "norm.eps" in why_not_native(replace(spec_of(LAYER), norm=NormSpec(eps=1.0)))


def test_layers_with_different_head_sizes_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"differ in attention.head_dim \(8 and 16\); KV blocks hold one"):
        spec_of(LAYER, attention(head_dim=16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: attention(num_heads=5),
            r"num_attention_heads \(5\) must be a multiple of num_key_value_heads \(2\)",
        ),
        (lambda: attention(head_dim=7), r"an odd head_dim \(7\)"),
        (lambda: attention(window=0), "sliding_window must be a positive integer, got 0"),
        (lambda: mlp(intermediate_size="8"), "intermediate_size must be a positive integer, got '8'"),
        (lambda: replace(spec_of(LAYER), vocab_size=-1), "vocab_size must be a positive integer, got -1"),
        (lambda: spec_of(), "num_hidden_layers must be a positive integer, got 0"),
        (lambda: repeat_layer(LAYER, 2**40), "num_hidden_layers must be an integer from 1 to 4096"),
        (lambda: repeat_layer(LAYER, 2.0), "num_hidden_layers must be an integer from 1 to 4096, got 2.0"),
    ],
)
def test_inconsistent_specs_are_refused(make, message):
    with pytest.raises(ModelLoadError, match=message):
        make()


CONFIG = {
    "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "sliding_window": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None] * 4),
        ({"use_sliding_window": True}, [6] * 4),
        ({"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [6]),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 6] * 2),
        ({"layer_types": ["full_attention"] * 4, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": None, "use_sliding_window": True}, [None] * 4),
    ],
)
def test_attention_windows_are_assigned_per_layer(changes, windows):
    config = CONFIG | changes
    spec = with_sliding_windows(spec_from_huggingface("LoomForCausalLM", config), config)
    assert [layer.attention.window for layer in spec.layers] == windows
    assert spec.sliding_window == (6 if 6 in windows else None)
