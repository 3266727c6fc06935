"""The native CPU kernels: a small C++ library, compiled on first use for the processor it runs on.

`build` compiles and caches it, `library` calls it, `arena` holds packed weights, `model` packs them, `backend` runs
steps, `sampling` draws tokens; the kernels are in `csrc`.
"""

import logging
from collections.abc import Callable

import torch

from treadle.backends.cpu.backend import CPUBackend
from treadle.backends.cpu.build import BUILDS, KernelBuildError, best_build, missing_features
from treadle.backends.cpu.library import Library, load_library
from treadle.backends.cpu.model import NativeModel, why_not_native
from treadle.backends.protocol import BackendSettings
from treadle.backends.threads import default_num_threads
from treadle.core.errors import ConfigError
from treadle.models.loaders.base import WeightSource
from treadle.models.spec import ModelSpec, weight_shapes

logger = logging.getLogger("treadle")

__all__ = ["BUILDS", "CPUBackend", "KernelBuildError", "Library", "best_build", "load_library", "open", "why_not"]


def why_not(spec: ModelSpec, settings: BackendSettings) -> str | None:
    """Why the native kernels cannot compute the model with these settings; None if they can.

    Raises:
        ConfigError: a build was requested by name and cannot be used.
    """
    if settings.cpu_kernels == "off":
        return "cpu_kernels is off"
    by_name = settings.cpu_kernels != "auto"
    reason = _why_settings_exclude(settings)
    if reason is not None:
        if by_name:
            raise ConfigError("cpu_kernels", f"{settings.cpu_kernels} {reason}; set it to auto")
        return reason
    build = _build(settings)
    if build is None:
        logger.warning(
            "no native CPU kernels for this processor (they need Linux on x86 with AVX2 or on 64-bit ARM): "
            "computing with plain torch"
        )
        return "this processor has no native kernels"
    missing = missing_features(build)
    if missing:
        raise ConfigError("cpu_kernels", f"{build} needs what this processor lacks: {', '.join(missing)}")
    reason = why_not_native(spec)
    if reason is None:
        try:
            load_library(build)
            return None
        except KernelBuildError as error:
            reason = str(error)
    if by_name:
        raise ConfigError("cpu_kernels", f"{build} cannot be used: {reason}")
    logger.warning("no native CPU kernels, computing with plain torch: %s", reason)
    return reason


def _build(settings: BackendSettings) -> str | None:
    """The build that was requested by name, or the best one that this processor can run."""
    return best_build() if settings.cpu_kernels == "auto" else settings.cpu_kernels


def _weight_format(spec: ModelSpec, weights: WeightSource, settings: BackendSettings) -> str:
    """Which of WEIGHT_FORMATS the settings mean for this model."""
    if settings.quantization in ("int8", "int4"):
        return settings.quantization
    is_quantized = any(weights.block_format(name) for name, shape in weight_shapes(spec) if len(shape) == 2)
    return "stored" if is_quantized and settings.may_use_stored else "bfloat16"


def _why_settings_exclude(settings: BackendSettings) -> str | None:
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        return "runs only on the CPU"
    if settings.dtype == "float32":
        return "does not support dtype float32"
    return None


def open(
    spec: ModelSpec,
    weights: WeightSource,
    settings: BackendSettings,
    on_progress: Callable[[float], None] = lambda _: None,
) -> CPUBackend:
    """Pack the weights for the kernels.

    Args:
        spec: of the model.
        weights: its weights.
        settings: for which `why_not` returned None.
        on_progress: called with a number from 0 to 1 while weights are read.
    """
    build = _build(settings)
    assert build is not None
    threads = settings.num_threads or default_num_threads()
    model = NativeModel(
        spec,
        weights,
        library=load_library(build),
        weight_format=_weight_format(spec, weights, settings),
        max_model_len=settings.max_model_len,
        threads=threads,
        on_progress=on_progress,
    )
    return CPUBackend(model, block_size=settings.block_size, int8_kv=settings.int8_kv, threads=threads)
