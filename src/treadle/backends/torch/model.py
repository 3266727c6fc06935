"""The forward pass in plain torch: it interprets a ModelSpec and knows no architecture.

Shapes: T tokens of a step, E hidden size, H query heads, K key-value heads, D head dimension, I
intermediate size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from treadle.backends.torch import reference as kernels
from treadle.core.errors import UnsupportedModelError
from treadle.models.loaders.base import WeightSource
from treadle.models.rope import rotary_tables
from treadle.models.spec import LayerSpec, ModelSpec, unsupported_property

INT8_GROUP = 64
"""Neighbouring activations that share a scale under int8 quantization."""

SUPPORTED = {
    "attention.kind": ("grouped-query",),
    "norm.kind": ("rms",),
    "mlp.kind": ("gated",),
    "mlp.activation": ("silu",),
}
"""Properties of a layer, and the values of each that are supported here."""


class Attention(Protocol):
    """Stores the keys and values of a step's tokens and computes their attention over their contexts."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, H, D], [T, K × D], [T, K × D] → [T, H × D]."""
        ...


@dataclass(frozen=True, slots=True)
class _Linear:
    """x → x Wᵀ + b, with W [out, in]; with `int8`, x is rounded as int8 activations are."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    int8: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.int8:
            x = kernels.round_to_int8(x, INT8_GROUP)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    input_norm: torch.Tensor  # [E]
    qkv: _Linear  # [(H + 2K) × D, E]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: _Linear  # [E, H × D]
    post_attention_norm: torch.Tensor  # [E]
    gate_up: _Linear  # [2I, E]
    down: _Linear  # [E, I]


class TorchModel:
    """Weights and forward pass.

    Args:
        config: of the model.
        weights: source of the tensors.
        dtype: of weights and activations.
        device: where to compute.
        max_model_len: positions that the rotary tables cover.
        int8: whether weights (per output channel) and activations (per group of 64) are rounded to what int8
            holds. The products stay in `dtype`: this simulates int8 and is not fast.
        on_progress: called with a number from 0 to 1 while weights are read.

    Raises:
        UnsupportedModelError: a layer is not supported here; the message names the property.
        ModelLoadError: a weight is missing or has another shape.
    """

    def __init__(
        self,
        config: ModelSpec,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        int8: bool = False,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        reason = unsupported_property(config, SUPPORTED)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self.int8 = int8
        self._embedding = self._get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = []
        for i, layer in enumerate(config.layers):
            self._layers.append(self._load_layer(i, layer))
            on_progress((i + 1) / config.num_hidden_layers)
        self._norm = self._get("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self._embedding = self._round(self._embedding)
            lm_head = self._embedding
        else:
            lm_head = self._round(self._get("lm_head.weight", config.vocab_size, config.hidden_size))
        self._lm_head = _Linear(lm_head, None, int8)
        self._rotary = {}  # rope → cosines and sines, [max_model_len, D] each
        for rope in {layer.attention.rope for layer in config.layers if layer.attention.rope is not None}:
            cos, sin = rotary_tables(rope, config.head_dim, max_model_len, dtype)
            self._rotary[rope] = cos.to(device), sin.to(device)
        del self._weights

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states of a step's tokens, normalized: [T, E].

        Args:
            token_ids: int64 [T].
            positions: int64 [T], of each token in its sequence.
            attention: stores keys and values, and attends.
        """
        rotary = {
            rope: (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))  # [T, 1, D] each
            for rope, (cos, sin) in self._rotary.items()
        }
        x = F.embedding(token_ids, self._embedding)  # [T, E]
        for i, layer in enumerate(self._layers):
            spec, eps = layer.spec.attention, layer.spec.norm.eps
            h = kernels.rms_norm(x, layer.input_norm, eps)
            q, k, v = torch.split(layer.qkv(h), [spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
            q = q.view(-1, spec.num_heads, spec.head_dim)  # [T, H, D]
            k = k.view(-1, spec.num_kv_heads, spec.head_dim)  # [T, K, D]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = kernels.rms_norm(q, layer.q_norm, eps)
                k = kernels.rms_norm(k, layer.k_norm, eps)
            if spec.rope is not None:
                cos, sin = rotary[spec.rope]
                q = kernels.rotary(q, cos, sin)
                k = kernels.rotary(k, cos, sin)
            x = x + layer.o(attention(i, q, k.flatten(1), v))
            h = kernels.rms_norm(x, layer.post_attention_norm, eps)
            x = x + layer.down(kernels.silu_and_mul(layer.gate_up(h)))
        return kernels.rms_norm(x, self._norm, self.config.norm.eps)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary: [n, E] → float32 [n, V]."""
        return self._lm_head(hidden_states).float()

    def _load_layer(self, i: int, spec: LayerSpec) -> _Layer:
        hidden_size = self.config.hidden_size
        attention, mlp = spec.attention, spec.mlp
        name = f"model.layers.{i}"
        has_norm = attention.qk_norm
        return _Layer(
            spec=spec,
            input_norm=self._get(f"{name}.input_layernorm.weight", hidden_size),
            qkv=self._linear(
                {
                    f"{name}.self_attn.q_proj": attention.q_size,
                    f"{name}.self_attn.k_proj": attention.kv_size,
                    f"{name}.self_attn.v_proj": attention.kv_size,
                },
                hidden_size,
                attention.qkv_bias,
            ),
            q_norm=self._get(f"{name}.self_attn.q_norm.weight", attention.head_dim) if has_norm else None,
            k_norm=self._get(f"{name}.self_attn.k_norm.weight", attention.head_dim) if has_norm else None,
            o=self._linear({f"{name}.self_attn.o_proj": hidden_size}, attention.q_size, attention.o_bias),
            post_attention_norm=self._get(f"{name}.post_attention_layernorm.weight", hidden_size),
            gate_up=self._linear(
                {f"{name}.mlp.gate_proj": mlp.intermediate_size, f"{name}.mlp.up_proj": mlp.intermediate_size},
                hidden_size,
                mlp.bias,
            ),
            down=self._linear({f"{name}.mlp.down_proj": hidden_size}, mlp.intermediate_size, mlp.bias),
        )

    def _linear(self, parts: dict[str, int], in_size: int, has_bias: bool) -> _Linear:
        """One projection out of several that read the same input: name → output size."""
        weight = self._round(torch.cat([self._get(f"{name}.weight", out, in_size) for name, out in parts.items()]))
        bias = None
        if has_bias:
            bias = torch.cat([self._get(f"{name}.bias", out) for name, out in parts.items()])
        return _Linear(weight, bias, self.int8)

    def _round(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, in], with one scale per output channel under int8."""
        return kernels.round_to_int8(weight, weight.shape[-1]) if self.int8 else weight

    def _get(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.get(name, shape, self.dtype).to(self.device)
