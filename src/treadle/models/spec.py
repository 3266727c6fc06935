"""What a decoder-only transformer is made of: data that the loaders make and the forward passes interpret."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.core.metadata import MAX_SIZE, is_finite

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
MAX_LAYERS = 4096
"""More than any model has; a file that claims more is broken."""
MAX_POSITIONS = 2**24
"""Positions are float32 when they become angles: these integers are exact, larger ones are not."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it was stretched to longer contexts.

    Attributes:
        theta: base of the frequencies, at least 1.
        rope_type: "default", "linear" (positions divided by `factor`) or "llama3" (low frequencies divided
            by `factor`, with a smooth transition in between; Llama 3.1).
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: parameters of the scaling.
        frequency_divisors: one positive number per frequency, as GGUF files store them; empty if there are none.

    Raises:
        ModelLoadError: a number outside its range.
        UnsupportedModelError: an unknown rope type.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_divisors: tuple[float, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.rope_type not in SUPPORTED_ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {self.rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        _check_number("rope_theta", self.theta, minimum=1.0)
        _check_number("rope factor", self.factor, minimum=1.0)
        _check_number("low_freq_factor", self.low_freq_factor)
        _check_number("high_freq_factor", self.high_freq_factor)
        _check_sizes(self, original_max_position_embeddings="original_max_position_embeddings")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelLoadError(
                f"high_freq_factor ({self.high_freq_factor}) must be greater than low_freq_factor "
                f"({self.low_freq_factor})"
            )
        for divisor in self.frequency_divisors:
            _check_number("each rope frequency divisor", divisor, minimum=1e-6)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of a layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: sizes; num_heads / num_kv_heads query heads share a KV head.
        rope: rotation of queries and keys; None for a layer without position embedding.
        kind: "grouped-query" (Ainslie et al. 2023), which covers multi-head and multi-query attention.
        qkv_bias, o_bias: which projections have a bias.
        qk_norm: whether queries and keys are normalized per head before the rotation.
        window: how many tokens back attention looks; None for all.

    Raises:
        ModelLoadError: a size or window that is not a positive integer, heads that cannot be grouped evenly, or
            a number of rope divisors other than head_dim / 2.
        UnsupportedModelError: an odd head_dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    kind: str = "grouped-query"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, num_heads="num_attention_heads", num_kv_heads="num_key_value_heads", head_dim="head_dim")
        if self.window is not None:
            _check_sizes(self, window="sliding_window")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"an odd head_dim ({self.head_dim}) is not supported")
        divisors = () if self.rope is None else self.rope.frequency_divisors
        if divisors and len(divisors) != self.head_dim // 2:
            raise ModelLoadError(
                f"rope_freqs.weight must have {self.head_dim // 2} numbers, half of head_dim; got {len(divisors)}"
            )

    @property
    def q_size(self) -> int:
        """Length of a token's queries: all heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Length of a token's keys, and of its values: all KV heads together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A normalization.

    Attributes:
        eps: added to the mean square; positive.
        kind: "rms" (Zhang and Sennrich 2019).

    Raises:
        ModelLoadError: an eps that is not positive and finite.
    """

    eps: float
    kind: str = "rms"

    def __post_init__(self) -> None:
        _check_number("rms_norm_eps", self.eps)


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """The feed-forward part of a layer.

    Attributes:
        intermediate_size: length of the vector between its two projections.
        kind: "gated": down(activation(gate(x)) × up(x)) (Shazeer 2020).
        activation: "silu".
        bias: whether its projections have a bias.

    Raises:
        ModelLoadError: an intermediate_size that is not a positive integer.
    """

    intermediate_size: int
    kind: str = "gated"
    activation: str = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self, intermediate_size="intermediate_size")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
        norm: in front of the attention and in front of the MLP.
        attention, mlp: its two halves.
    """

    norm: NormSpec
    attention: AttentionSpec
    mlp: MLPSpec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: embedding, layers, a normalization, output projection.

    A spec may say more than the forward passes compute: each refuses what it cannot (`unsupported_property`).

    Attributes:
        architecture: what the model's files call it; for messages only.
        vocab_size, hidden_size: sizes of the embedding and of the output projection.
        max_position_embeddings: longest sequence that it supports, in tokens; at most 2^24.
        tie_word_embeddings: whether the output projection is the embedding.
        layers: first to last.
        norm: in front of the output projection.

    Raises:
        ModelLoadError: a size that is not a positive integer or too large, or no layers.
        UnsupportedModelError: layers whose keys and values differ in shape.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    norm: NormSpec

    def __post_init__(self) -> None:
        _check_sizes(
            self,
            vocab_size="vocab_size",
            hidden_size="hidden_size",
            max_position_embeddings="max_position_embeddings",
            num_hidden_layers="num_hidden_layers",
        )
        if self.max_position_embeddings > MAX_POSITIONS:
            raise ModelLoadError(
                f"max_position_embeddings must be at most {MAX_POSITIONS}, got {self.max_position_embeddings}"
            )
        # A KV block has a slot of one shape for every layer.
        for path in ("attention.num_kv_heads", "attention.head_dim"):
            reason = differing_layers(self, path)
            if reason is not None:
                raise UnsupportedModelError(f"{reason}; KV blocks hold one shape")

    @property
    def num_hidden_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of every layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Length of a head's vectors, in every layer."""
        return self.layers[0].attention.head_dim

    @property
    def sliding_window(self) -> int | None:
        """The shortest window of any layer, in tokens; None if all look back to the first token."""
        windows = [layer.attention.window for layer in self.layers if layer.attention.window is not None]
        return min(windows, default=None)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token takes."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * element_size


def repeat_layer(layer: LayerSpec, num_hidden_layers: int) -> tuple[LayerSpec, ...]:
    """`num_hidden_layers` times the same layer; ModelLoadError unless it is an integer from 1 to MAX_LAYERS."""
    if not isinstance(num_hidden_layers, int) or not 1 <= num_hidden_layers <= MAX_LAYERS:
        raise ModelLoadError(
            f"num_hidden_layers must be an integer from 1 to {MAX_LAYERS}, got {num_hidden_layers!r}"
        )
    return (layer,) * num_hidden_layers


def weight_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight that a model needs, by Hugging Face's names of Llama's weights."""
    hidden_size = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden_size)
    for i, layer in enumerate(spec.layers):
        attention, mlp = layer.attention, layer.mlp
        name = f"model.layers.{i}"
        yield f"{name}.input_layernorm.weight", (hidden_size,)
        yield f"{name}.post_attention_layernorm.weight", (hidden_size,)
        if attention.qk_norm:
            yield f"{name}.self_attn.q_norm.weight", (attention.head_dim,)
            yield f"{name}.self_attn.k_norm.weight", (attention.head_dim,)
        for part, out_size, in_size, has_bias in (
            ("self_attn.q_proj", attention.q_size, hidden_size, attention.qkv_bias),
            ("self_attn.k_proj", attention.kv_size, hidden_size, attention.qkv_bias),
            ("self_attn.v_proj", attention.kv_size, hidden_size, attention.qkv_bias),
            ("self_attn.o_proj", hidden_size, attention.q_size, attention.o_bias),
            ("mlp.gate_proj", mlp.intermediate_size, hidden_size, mlp.bias),
            ("mlp.up_proj", mlp.intermediate_size, hidden_size, mlp.bias),
            ("mlp.down_proj", hidden_size, mlp.intermediate_size, mlp.bias),
        ):
            yield f"{name}.{part}.weight", (out_size, in_size)
            if has_bias:
                yield f"{name}.{part}.bias", (out_size,)
    yield "model.norm.weight", (hidden_size,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden_size)


def unsupported_property(spec: ModelSpec, supported: Mapping[str, Collection[Any]]) -> str | None:
    """The first property of a layer that is not among those supported, in words; None if all are.

    Args:
        spec: of the model.
        supported: property of LayerSpec, such as "mlp.activation" → the values that can be computed.
    """
    for path, values in supported.items():
        for i, layer in enumerate(spec.layers):
            value = attrgetter(path)(layer)
            if value not in values:
                return f"layer {i}: {path} {value!r} is not supported; supported: {', '.join(map(str, values))}"
    if spec.norm.kind not in supported["norm.kind"]:
        return f"norm.kind {spec.norm.kind!r} in front of the output projection is not supported"
    return None


def differing_layers(spec: ModelSpec, path: str) -> str | None:
    """Two layers that differ in a property of LayerSpec, in words; None if all have the same."""
    get = attrgetter(path)
    for i, layer in enumerate(spec.layers):
        if get(layer) != get(spec.layers[0]):
            return f"layers 0 and {i} differ in {path} ({get(spec.layers[0])} and {get(layer)})"
    return None


def _check_sizes(owner: object, **names: str) -> None:
    """Sizes must be positive integers; the message has the name that Hugging Face's config.json uses."""
    for attribute, name in names.items():
        value = getattr(owner, attribute)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{name} must be a positive integer, got {value!r}")
        if value > MAX_SIZE:
            raise ModelLoadError(f"{name} must be at most {MAX_SIZE}, got {value}")


def _check_number(name: str, value: float, minimum: float = 0.0) -> None:
    if not is_finite(value) or value <= 0.0 or value < minimum:
        wanted = f"of at least {minimum:g}" if minimum else "greater than 0"
        raise ModelLoadError(f"{name} must be a finite number {wanted}, got {value!r}")
