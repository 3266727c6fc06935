"""What a user can set, checked before a model is loaded. Imports no torch."""

import math
import re
from dataclasses import dataclass
from typing import Any

from treadle.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    SchedulerConfig,
    check_count,
)
from treadle.errors import ConfigError
from treadle.scheduler.policies.registry import WHOLE_PROMPT_POLICIES, check_policy_names

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The embedded model."""

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = (None, "int8")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8")
CPU_KERNELS = ("auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "off")
"""Builds of the native kernels, best first, and their absence."""

_MEMORY_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user can set. None means: find a sensible value.

    Attributes:
        model: a name, a folder, a .gguf file or a hub id.
        dtype: "float32", "bfloat16" or "auto" (bfloat16 on the native kernels and on cuda, else what the
            processor computes best). float32 is the reference, in plain torch.
        quantization: "int8" for weights with a scale per output channel and activations with one per group of
            64, made from any model when it is loaded; None for none. On a CPU.
        kv_cache_dtype: "bfloat16", "int8" (a scale per token and head) or "auto" (int8 with quantization
            "int8", else the model's).
        device: "cpu", "cuda" or "auto" (cuda when there is one).
        cpu_kernels: the build of the native CPU kernels, "auto" for the best that runs here, "off" for plain
            torch.
        num_threads: threads that compute on a CPU; torch's own number (all cores) by default.
        max_model_len: most tokens of prompt and output together; the model's own limit by default.
        max_num_seqs: most sequences that run at once (256, or fewer if a step computes fewer tokens).
        max_num_batched_tokens: most tokens that one step computes.
        block_size: token slots of a KV block.
        num_kv_blocks: blocks of the KV pool. At most one of this and kv_cache_memory.
        kv_cache_memory: bytes of the KV pool, as a number or as text ("512M", "2GiB").
        enable_prefix_caching: whether prompts share the KV of equal beginnings.
        scheduler: phase policy by name.
        order: who goes first, by name.
        preemption_mode: how a request gives up its blocks: auto, recompute or swap.
        swap_space: GiB of memory for the blocks of swapped requests.
        admission_headroom: free blocks per running sequence that an admission leaves.
        max_consecutive_prefills: policies `phased` and `prefill-first`: prefill steps in a row while others
            wait to decode.
        long_prefill_token_threshold: tokens left above which a prompt leaves half of a step's prompt tokens to others
            (max_num_batched_tokens); 0 for none.
        age_limit_s: seconds after which a waiting request goes before all that have waited less.
        max_num_queued_requests, max_num_queued_tokens: most requests, and tokens of their prompts, that wait.
        seed: of requests that bring none.
        max_logprobs: most logprobs that a request may ask for.
        log_stats_interval_s: seconds between lines of statistics; 0 for none.
        check_invariants: check the scheduler's state in every step.
        record: file to record every step in, for `treadle explain`.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    cpu_kernels: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    enable_prefix_caching: bool = True
    scheduler: str = "chunked"
    order: str = "fcfs"
    preemption_mode: str = "auto"
    swap_space: float = 1.0
    admission_headroom: int = 1
    max_consecutive_prefills: int = 8
    long_prefill_token_threshold: int | None = None
    age_limit_s: float | None = 60.0
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    seed: int = 0
    max_logprobs: int = 20
    log_stats_interval_s: float = 5.0
    check_invariants: bool = False
    record: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model", f"must be a name or a path, got {self.model!r}")
        for name, choices in (
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("device", DEVICES),
            ("cpu_kernels", CPU_KERNELS),
        ):
            if getattr(self, name) not in choices:
                allowed = ", ".join(str(choice) for choice in choices)
                raise ConfigError(name, f"must be one of {allowed}; got {getattr(self, name)!r}")
        if self.num_threads is not None:
            check_count("num_threads", self.num_threads)
        if self.max_model_len is not None:
            check_count("max_model_len", self.max_model_len, low=2)
        if self.max_num_seqs is not None:
            check_count("max_num_seqs", self.max_num_seqs)
        check_count("block_size", self.block_size)
        check_count("max_logprobs", self.max_logprobs, low=0)
        if self.num_kv_blocks is not None:
            check_count("num_kv_blocks", self.num_kv_blocks)
            if self.kv_cache_memory is not None:
                raise ConfigError("num_kv_blocks", "give at most one of num_kv_blocks and kv_cache_memory")
        if self.kv_cache_memory is not None:
            parse_memory_size("kv_cache_memory", self.kv_cache_memory)
        parse_swap_space(self.swap_space)
        # The scheduler's own limits, before a model is loaded for nothing.
        check_policy_names(self.scheduler_config(max_model_len=self.max_model_len or 2))

    def scheduler_config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's part, once the length is known."""
        budget, seats = self.max_num_batched_tokens, self.max_num_seqs
        if seats is None:
            seats = DEFAULT_MAX_NUM_SEQS if budget is None else min(DEFAULT_MAX_NUM_SEQS, budget)
        if budget is None:
            budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seats)
            if self.scheduler in WHOLE_PROMPT_POLICIES:
                budget = max(budget, max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            policy=self.scheduler,
            order=self.order,
            preemption_mode=self.preemption_mode,
            admission_headroom=self.admission_headroom,
            max_consecutive_prefills=self.max_consecutive_prefills,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            age_limit_s=self.age_limit_s,
            max_num_queued_requests=self.max_num_queued_requests,
            max_num_queued_tokens=self.max_num_queued_tokens,
            seed=self.seed,
        )


def parse_memory_size(field: str, value: Any) -> int:
    """Bytes of a size given as a number or as text such as "512M" or "2GiB"; ConfigError otherwise."""
    if isinstance(value, str):
        match = _MEMORY_SIZE.fullmatch(value.strip())
        if match is None:
            raise ConfigError(field, f"must be bytes or a size such as '512M' or '2GiB', got {value!r}")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    check_count(field, value)
    return int(value)


def parse_swap_space(value: Any) -> int:
    """Bytes of a swap space given in GiB; ConfigError for anything but a number from 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError("swap_space", f"must be a number of GiB from 0, got {value!r}")
    return int(value * 2**30)
