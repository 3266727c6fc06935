"""Plain torch, on a CPU or with CUDA: the reference, and the twin of the native kernels."""

import logging
from collections.abc import Callable

import torch

from treadle.backends.protocol import BackendSettings
from treadle.backends.torch.backend import TorchBackend
from treadle.backends.torch.model import TorchModel
from treadle.core.errors import ConfigError
from treadle.models.loaders.base import WeightSource
from treadle.models.spec import ModelSpec

logger = logging.getLogger("treadle")

__all__ = ["TorchBackend", "TorchModel", "open", "why_not"]


def why_not(spec: ModelSpec, settings: BackendSettings) -> str | None:
    """Always None: plain torch computes what it can, and refuses the rest.

    Raises:
        ConfigError: settings that plain torch cannot follow.
    """
    device = _device(settings)
    if device.type == "cuda" and (settings.int8_weights or settings.int8_kv):
        field = "quantization" if settings.int8_weights else "kv_cache_dtype"
        raise ConfigError(field, "int8 is computed on a CPU only; set device to cpu")
    if settings.kv_cache_dtype == "bfloat16" and _dtype(settings, device) != torch.bfloat16:
        raise ConfigError("kv_cache_dtype", "bfloat16 beside dtype float32 needs the native CPU kernels")
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
        settings: to which `why_not` had no objection.
        on_progress: called with a number from 0 to 1 while weights are read.
    """
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    if settings.int8_weights:
        logger.warning("int8 without the native kernels is only shown, not computed: expect it to be slow")
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
        raise ConfigError("device", "cuda was asked for, but torch sees no such device")
    return torch.device(settings.device)


def _dtype(settings: BackendSettings, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16
    if settings.int8_weights or settings.int8_kv:
        return torch.float32  # int8 is only shown by torch, not computed; see TorchModel
    # Without instructions for bfloat16, torch's products in it are slower than in float32.
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return torch.bfloat16 if has_bfloat16 else torch.float32
