"""Decides what computes: plain torch or the native CPU kernels, and in which numbers."""

import logging
from dataclasses import dataclass

import torch

from treadle.engine_config import EngineConfig
from treadle.errors import ConfigError
from treadle.kernels.cpu import KernelBuildError, Library, best_build, load_library, missing_features
from treadle.kernels.cpu.library import kv_cache_struct
from treadle.models.native import why_not_native
from treadle.models.spec import ModelSpec

logger = logging.getLogger("treadle")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What computes a model.

    Attributes:
        device: where.
        dtype: of activations, and of weights and KV unless they are int8.
        int8_weights, int8_kv: what is int8.
        library: the native kernels; None for plain torch.
        num_threads: that compute on a CPU.
    """

    device: torch.device
    dtype: torch.dtype
    int8_weights: bool
    int8_kv: bool
    library: Library | None
    num_threads: int

    def block_bytes(self, model: ModelSpec, block_size: int) -> int:
        """Bytes of a KV block of all layers."""
        if self.library is not None:
            struct = kv_cache_struct(
                num_layers=model.num_hidden_layers,
                block_size=block_size,
                num_kv_heads=model.num_key_value_heads,
                head_dim=model.head_dim,
                int8=self.int8_kv,
            )
            return self.library.kv_block_bytes(struct)
        return block_size * model.kv_bytes_per_token(self.dtype.itemsize)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        weights, kv = ("int8" if is_int8 else name for is_int8 in (self.int8_weights, self.int8_kv))
        numbers = weights if weights == kv else f"{weights} with {kv} KV"
        if self.library is not None:
            return f"{numbers} on {self.num_threads} threads with {self.library.build} kernels"
        return f"{numbers} on {self.device.type} with torch"


def choose_compute(config: EngineConfig, model: ModelSpec) -> Compute:
    """What computes `model` under a user's settings.

    Raises:
        ConfigError: what was asked for does not work with this model on this machine.
    """
    device = _device(config.device)
    int8_weights = config.quantization == "int8"
    int8_kv = config.kv_cache_dtype == "int8" or (config.kv_cache_dtype == "auto" and int8_weights)
    if device.type == "cuda" and (int8_weights or int8_kv):
        field = "quantization" if int8_weights else "kv_cache_dtype"
        raise ConfigError(field, "int8 is computed on a CPU only; set device to cpu")
    library = _library(config, model) if device.type == "cpu" and config.dtype != "float32" else None
    if library is None and config.cpu_kernels not in ("auto", "off"):
        reason = (
            "is for the CPU"
            if device.type != "cpu"
            else "cannot be had with dtype float32, which plain torch computes"
        )
        raise ConfigError("cpu_kernels", f"{config.cpu_kernels} {reason}; leave it at auto")
    if library is None and int8_weights:
        logger.warning("int8 without the native kernels is only shown, not computed: expect it to be slow")
    dtype = _dtype(config.dtype, device, native=library is not None, int8=int8_weights or int8_kv)
    if library is None and config.kv_cache_dtype == "bfloat16" and dtype != torch.bfloat16:
        raise ConfigError("kv_cache_dtype", "bfloat16 beside dtype float32 needs the native CPU kernels")
    return Compute(
        device=device,
        dtype=dtype,
        int8_weights=int8_weights,
        int8_kv=int8_kv,
        library=library,
        num_threads=config.num_threads or torch.get_num_threads(),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda was asked for, but torch sees no such device")
    return torch.device(name)


def _library(config: EngineConfig, model: ModelSpec) -> Library | None:
    """The native kernels, if they can be had; what was asked for by name and cannot be had is an error."""
    if config.cpu_kernels == "off":
        return None
    by_name = config.cpu_kernels != "auto"
    build = config.cpu_kernels if by_name else best_build()
    if build is None:
        logger.warning("no native CPU kernels for this processor (they need AVX2): computing with plain torch")
        return None
    missing = missing_features(build)
    if missing:
        raise ConfigError("cpu_kernels", f"{build} needs what this processor lacks: {', '.join(missing)}")
    reason = why_not_native(model)
    if reason is None:
        try:
            return load_library(build)
        except (KernelBuildError, OSError) as error:
            reason = str(error)
    if by_name:
        raise ConfigError("cpu_kernels", f"{build} cannot be used: {reason}")
    logger.warning("no native CPU kernels, computing with plain torch: %s", reason)
    return None


def _dtype(name: str, device: torch.device, *, native: bool, int8: bool) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda" or native:
        return torch.bfloat16
    if int8:
        return torch.float32  # int8 is only shown by torch, not computed; see LlamaModel
    # Without instructions for bfloat16, torch's products in it are slower than in float32.
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if has_bfloat16 else torch.float32
