"""The user's settings, validated before a model is loaded. Imports no torch."""

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from treadle.core.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_MODEL,
    MIN_MODEL_LEN,
    SchedulerConfig,
    SchedulingSettings,
)
from treadle.core.errors import ConfigError
from treadle.core.settings import check_count, check_settings, setting
from treadle.scheduler.policies.registry import check_policies, needs_whole_prompts

CPU_KERNELS = ("auto", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon_dotprod", "neon", "off")
"""Choices of `cpu_kernels`: automatic, the builds of the native kernels from best to worst, and none."""

_MEMORY_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

MAX_BYTES = 2**63 - 1
"""The largest size of memory that can be asked for."""

_model = partial(setting, group="model and processor")
_cache = partial(setting, group="KV cache")
_requests = partial(setting, group="requests")
_watching = partial(setting, group="watching")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingSettings):
    """The user's settings: keywords of `LLM` and options of the command line. None means that a default is derived.

    Each setting is declared here or in SchedulingSettings, with its help; docs/settings.md lists them.
    """

    model: str = _model(
        DEFAULT_MODEL,
        f"the embedded model ({DEFAULT_MODEL}), a folder in Hugging Face layout, a .gguf file, or a hub id",
        default_text="",
        metavar="MODEL",
    )
    dtype: str = _model(
        "auto",
        "data type of weights and activations: float32 (the reference, in plain torch), bfloat16, or auto (what "
        "quantization says on the native kernels, bfloat16 on cuda, else the fastest on the processor)",
        choices=("auto", "float32", "bfloat16"),
    )
    quantization: str | None = _model(
        None,
        "auto (None in Python): the weights of a quantized GGUF file as stored, with 8-bit activations, where the "
        "native kernels compute it and dtype is auto, and any other model as dtype says; none: as dtype says; int8, "
        "int4: 8-bit activations, and 8-bit or 4-bit weights made from any model while it loads",
        choices=(None, "auto", "none", "int8", "int4"),
        default_text="auto",
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "data type of the KV cache: bfloat16, int8 (a scale per token and head), or auto (int8 with quantization "
        "int8, else bfloat16 or, in plain torch, that of the activations)",
        choices=("auto", "bfloat16", "int8"),
    )
    device: str = _model(
        "auto", "where to compute: cpu, cuda, or auto (cuda if available)", choices=("auto", "cpu", "cuda")
    )
    cpu_kernels: str = _model(
        "auto",
        "build of the native CPU kernels: auto for the best that this processor runs, off for plain torch",
        choices=CPU_KERNELS,
    )
    num_threads: int | None = _model(
        None, "threads for computing on a CPU", low=1, high=1024, default_text="all cores the process may use"
    )
    block_size: int = _cache(16, "tokens of a KV block", low=1, high=2**16)
    num_kv_blocks: int | None = _cache(
        None,
        "blocks of the KV pool; at most one of this and kv_cache_memory",
        low=1,
        high=2**31 - 1,
        default_text="from free memory",
    )
    kv_cache_memory: int | str | None = _cache(
        None,
        "size of the KV pool in bytes, or as text such as 512M or 2GiB",
        metavar="SIZE",
        default_text="from free memory",
    )
    enable_prefix_caching: bool = _cache(True, "share the KV of common prompt prefixes")
    swap_space: float = _cache(1.0, "GiB of memory for the blocks of swapped requests", metavar="GIB")
    max_logprobs: int = _requests(20, "maximum logprobs that a request may ask for", low=0)
    parse_control_tokens_in_chat: bool = _requests(
        False,
        "make control tokens of text in chat messages that spells them, such as <|im_end|>; whoever writes a message "
        "can then forge the turns of others",
    )
    log_stats_interval_s: float = _watching(
        5.0, "seconds between log lines with statistics; 0 for none", metavar="SECONDS"
    )
    check_invariants: bool = _watching(False, "check the scheduler's state in every step (slow)")
    record: str | None = _watching(
        None, "file in which to record every step, for `treadle explain`", metavar="RUN.jsonl"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model", f"must be a name or a path, got {self.model!r}")
        check_settings(self, EngineConfig)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_kv_blocks", "give at most one of num_kv_blocks and kv_cache_memory")
        if self.kv_cache_memory is not None:
            parse_memory_size("kv_cache_memory", self.kv_cache_memory)
        parse_swap_space(self.swap_space)
        if not self.log_stats_interval_s >= 0:
            raise ConfigError("log_stats_interval_s", f"must be at least 0, got {self.log_stats_interval_s}")
        # Check the scheduler's limits before the model is loaded; a greater length breaks none of them.
        check_policies(self.scheduler_config(self.max_model_len or MIN_MODEL_LEN))

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's settings, once the maximum length is known."""
        budget, seats = self.max_num_batched_tokens, self.max_num_seqs
        if seats is None:
            seats = DEFAULT_MAX_NUM_SEQS if budget is None else min(DEFAULT_MAX_NUM_SEQS, budget)
        if budget is None:
            budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seats)
            if needs_whole_prompts(self.scheduler):
                budget = max(budget, max_model_len)
        sizes = {"max_model_len": max_model_len, "max_num_seqs": seats, "max_num_batched_tokens": budget}
        return SchedulerConfig(**{**self.scheduling(), **sizes})


def parse_memory_size(field: str, value: Any) -> int:
    """Bytes of a size given as a number or as text such as "512M" or "2GiB"; ConfigError otherwise."""
    if isinstance(value, str):
        match = _MEMORY_SIZE.fullmatch(value.strip())
        if match is None:
            raise ConfigError(field, f"must be bytes or a size such as '512M' or '2GiB', got {value!r}")
        number = float(match[1]) * _UNITS[match[2].upper()]
        if number > MAX_BYTES:
            raise ConfigError(field, f"must be at most {MAX_BYTES} bytes, got {value!r}")
        value = int(number)
    check_count(field, value, high=MAX_BYTES)
    return int(value)


def parse_swap_space(value: float) -> int:
    """Bytes of a swap space given in GiB; ConfigError if it is less than 0 or too large."""
    if not 0 <= value < math.inf:
        raise ConfigError("swap_space", f"must be a number of GiB, at least 0; got {value!r}")
    if value * 2**30 > MAX_BYTES:
        raise ConfigError("swap_space", f"must be at most {MAX_BYTES // 2**30} GiB, got {value}")
    return int(value * 2**30)
