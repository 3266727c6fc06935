"""What a model of the Llama family is made of, read from config.json or GGUF metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.errors import ModelLoadError, UnsupportedModelError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
SUPPORTED_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and how it was stretched to longer contexts.

    Attributes:
        theta: base of the frequencies.
        rope_type: "default", "linear" (positions divided by `factor`) or "llama3" (low frequencies divided
            by `factor`, with a smooth passage between; Llama 3.1).
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: of the scaling.
        frequency_divisors: one number per frequency instead of a formula, as GGUF files carry them.
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and variants of a decoder-only transformer of the Llama family.

    Attributes:
        architecture: one of SUPPORTED_ARCHITECTURES.
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
        num_key_value_heads, head_dim: sizes.
        rms_norm_eps: added to the mean square.
        max_position_embeddings: longest sequence it was made for.
        tie_word_embeddings: whether the output projection is the embedding.
        rope: rotary embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: whether queries and keys are normalized per head (Qwen3).
        sliding_window: tokens that attention looks back, None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"config: {name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelLoadError(
                f"config: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"an odd head_dim ({self.head_dim}) is not supported")

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token takes."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * element_size


def config_from_huggingface(config: Mapping[str, Any]) -> ModelConfig:
    """Read the content of a Hugging Face `config.json`.

    Raises:
        ModelLoadError: something is missing or makes no sense.
        UnsupportedModelError: an architecture or a variant that is not computed here.
    """
    architectures = config.get("architectures") or []
    known = [name for name in architectures if name in SUPPORTED_ARCHITECTURES]
    if not known:
        raise UnsupportedModelError(
            f"architecture {', '.join(architectures) or '(none named)'} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    architecture = known[0]
    _refuse_variants(config)
    try:
        hidden_size = config["hidden_size"]
        num_heads = config["num_attention_heads"]
        attention_bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            rms_norm_eps=float(config["rms_norm_eps"]),
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=_rope_from_huggingface(config),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_sliding_window(architecture, config),
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json lacks {error.args[0]!r}") from None
    except (TypeError, OverflowError) as error:
        raise ModelLoadError(f"config.json makes no sense ({error})") from error


def config_from_gguf(
    metadata: Mapping[str, Any], *, has_output: bool, rope_divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        metadata: key → value as in the file.
        has_output: whether the file has an output projection of its own.
        rope_divisors: content of the tensor `rope_freqs.weight`, if there is one.

    Raises:
        ModelLoadError: something is missing or makes no sense.
        UnsupportedModelError: an architecture or a variant that is not computed here.
    """
    arch = metadata.get("general.architecture")
    if arch not in SUPPORTED_GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported; supported are {', '.join(SUPPORTED_GGUF_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count"):
        raise UnsupportedModelError(f"mixtures of experts ({arch}.expert_count) are not supported")
    try:
        hidden_size = metadata[f"{arch}.embedding_length"]
        num_heads = metadata[f"{arch}.attention.head_count"]
        head_dim = metadata.get(f"{arch}.attention.key_length") or hidden_size // num_heads
        rotated = metadata.get(f"{arch}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise UnsupportedModelError(f"rotating {rotated} of {head_dim} head dimensions is not supported")
        scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
        return ModelConfig(
            architecture={
                "llama": "LlamaForCausalLM",
                "qwen2": "Qwen2ForCausalLM",
                "qwen3": "Qwen3ForCausalLM",
            }[arch],
            vocab_size=metadata.get(f"{arch}.vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
            hidden_size=hidden_size,
            intermediate_size=metadata[f"{arch}.feed_forward_length"],
            num_hidden_layers=metadata[f"{arch}.block_count"],
            num_attention_heads=num_heads,
            num_key_value_heads=metadata.get(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(metadata[f"{arch}.attention.layer_norm_rms_epsilon"]),
            max_position_embeddings=metadata[f"{arch}.context_length"],
            tie_word_embeddings=not has_output,
            rope=RopeConfig(
                theta=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
                rope_type="default" if scaling == "none" else scaling,
                factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
                frequency_divisors=rope_divisors,
            ),
            qkv_bias=arch == "qwen2",
            qk_norm=arch == "qwen3",
            sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        )
    except KeyError as error:
        raise ModelLoadError(f"the GGUF file's metadata lacks {error.args[0]!r}") from None
    except (TypeError, OverflowError) as error:
        raise ModelLoadError(f"the GGUF file's metadata makes no sense ({error})") from error


def _rope_from_huggingface(config: Mapping[str, Any]) -> RopeConfig:
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


def _sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    window: int | None = config.get("sliding_window")
    if architecture == "MistralForCausalLM":
        return window
    uses = config.get("use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ())
    return window if uses else None


def _refuse_variants(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {activation!r} is not supported; supported is silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"weights quantized by {method!r} are not supported; supported are plain safetensors and GGUF"
        )
