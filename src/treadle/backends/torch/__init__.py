"""Plain torch, on a CPU or with CUDA: the reference, and the counterpart of the native kernels."""

import logging
from collections.abc import Callable

import torch

from treadle.backends.protocol import BackendSettings
from treadle.backends.threads import default_num_threads
from treadle.backends.torch.backend import TorchBackend
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import ConfigError
from treadle.models.loaders.base import WeightSource
from treadle.models.spec import ModelSpec

logger = logging.getLogger("treadle")

__all__ = ["TorchBackend", "TorchModel", "open", "why_not"]


def why_not(spec: ModelSpec, settings: BackendSettings) -> str | None:
    """Always None: plain torch comes last, and `open` raises an error for a model that it cannot compute.

    Raises:
        ConfigError: plain torch does not support these settings.
    """
    device = _device(settings)
    if device.type == "cuda" and (settings.int8_weights or settings.int8_kv):
        field = "quantization" if settings.int8_weights else "kv_cache_dtype"
        raise ConfigError(field, "int8 is supported only on the CPU; set device to cpu")
    if settings.quantization == "int4":
        raise ConfigError("quantization", "int4 needs the native CPU kernels; set it to int8 or none")
    if settings.kv_cache_dtype == "bfloat16" and _dtype(settings, device) != torch.bfloat16:
        raise ConfigError(
            "kv_cache_dtype", "bfloat16 with dtype float32 needs the native CPU kernels; set it to auto"
        )
    return None


def open(
    spec: ModelSpec,
    weights: WeightSource,
    settings: BackendSettings,
    on_progress: Callable[[float], None] = lambda _: None,
) -> TorchBackend:
    """Read the weights into tensors.

    Args:
        spec: of the model.
        weights: its weights.
        settings: for which `why_not` returned None.
        on_progress: called with a number from 0 to 1 while weights are read.
    """
    torch.set_num_threads(settings.num_threads or default_num_threads())
    if settings.int8_weights:
        logger.warning("int8 without the native kernels is simulated in floating point, which is slow")
    device = _device(settings)
    model = TorchModel(
        spec,
        weights,
        dtype=_dtype(settings, device),
        device=device,
        max_model_len=settings.max_model_len,
        int8=settings.int8_weights,
        on_progress=on_progress,
    )
    return TorchBackend(model, block_size=settings.block_size, int8_kv=settings.int8_kv)


def _device(settings: BackendSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda is requested, but torch finds no CUDA device; set it to auto or cpu")
    return torch.device(settings.device)


def _dtype(settings: BackendSettings, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16
    if settings.int8_weights or settings.int8_kv:
        return torch.float32  # torch simulates int8; see TorchModel
    # Without bfloat16 instructions, torch's matrix products are slower in bfloat16 than in float32.
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if has_bfloat16 else torch.float32
