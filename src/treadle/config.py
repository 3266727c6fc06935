"""Settings of the scheduler and the cache, checked once when they are made. Derived sizes are new values."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from treadle.errors import ConfigError, InvalidRequestError
from treadle.sampling_params import SamplingParams, check_token_ids

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and choices of the scheduler.

    Attributes:
        max_model_len: most tokens of one sequence, prompt and output together.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens that one step computes.
        policy: the phase policy by name.
        order: who goes first, by name.
        preemption_mode: how a request gives up its blocks: "recompute", "swap", or "auto" (one sequence is
            computed again, several are swapped); without room in the host tier it is always computed again.
        admission_headroom: free blocks that an admission leaves per running sequence, so that the
            newcomer is not thrown out at the next block edge.
        max_consecutive_prefills: policy `phased` only: after this many prefill steps in a row, sequences
            that wait to decode get a step.
        long_prefill_token_threshold: a prompt with more tokens left to compute is long: of a step whose prompt tokens
            others can use, it takes at most this many and at most half. None for max_num_batched_tokens, 0 to
            let the first prompt take all it can.
        num_lookahead_slots: most drafts (tokens that the runner proposes) of a sequence that a step checks, for
            speculative decoding; they count as tokens, and are dropped where budget or blocks run out.
        max_loras: most LoRA adapters in one step.
        age_limit_s: seconds after which a waiting request goes before all that have waited less; None for never.
        max_num_queued_requests, max_num_queued_tokens: most requests, and tokens of their prompts, that may
            wait; None for any number.
        seed: of requests that bring none of their own.
    """

    max_model_len: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    policy: str = "chunked"
    order: str = "fcfs"
    preemption_mode: str = "auto"
    admission_headroom: int = 1
    max_consecutive_prefills: int = 8
    long_prefill_token_threshold: int | None = None
    num_lookahead_slots: int = 0
    max_loras: int = 1
    age_limit_s: float | None = 60.0
    max_num_queued_requests: int | None = None
    max_num_queued_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("max_model_len", self.max_model_len, low=2)
        check_count("max_num_seqs", self.max_num_seqs)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        check_count("admission_headroom", self.admission_headroom, low=0)
        check_count("max_consecutive_prefills", self.max_consecutive_prefills)
        if self.long_prefill_token_threshold is not None:
            check_count("long_prefill_token_threshold", self.long_prefill_token_threshold, low=0)
        check_count("num_lookahead_slots", self.num_lookahead_slots, low=0)
        check_count("max_loras", self.max_loras, low=0)
        check_count("seed", self.seed, low=0)
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.age_limit_s is not None and not self.age_limit_s > 0:
            raise ConfigError("age_limit_s", f"must be greater than 0 or None, got {self.age_limit_s}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(
                "preemption_mode",
                f"must be one of {', '.join(PREEMPTION_MODES)}; got {self.preemption_mode!r}",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running sequence "
                f"can decode in each step; got {self.max_num_batched_tokens}",
            )

    @property
    def long_prefill_tokens(self) -> int:
        """Tokens left above which a prompt is long; 0 for none."""
        threshold = self.long_prefill_token_threshold
        return self.max_num_batched_tokens if threshold is None else threshold


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Shape of the paged KV cache.

    Attributes:
        num_blocks: blocks of the device tier.
        num_host_blocks: blocks of the host tier, where swapped requests rest.
        block_size: token slots of a block.
        enable_prefix_caching: whether finished blocks stay findable for other requests.
    """

    num_blocks: int
    num_host_blocks: int = 0
    block_size: int = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_count("num_kv_blocks", self.num_blocks)
        check_count("num_host_blocks", self.num_host_blocks, low=0)
        check_count("block_size", self.block_size)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a single request may ask for.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are below this.
        max_logprobs: most `logprobs` or `prompt_logprobs`.
        max_model_len_reason: what set max_model_len, for the error message.
    """

    max_model_len: int
    vocab_size: int
    max_logprobs: int = 20
    max_model_len_reason: str = "the model's length"

    def check(self, prompt_token_ids: Sequence[Any], sampling_params: SamplingParams) -> None:
        """Raise InvalidRequestError, naming field, value and limit, if the request cannot be served."""
        if len(prompt_token_ids) == 0:
            raise InvalidRequestError("prompt", "is empty; it needs at least one token")
        check_token_ids("prompt_token_ids", prompt_token_ids, self.vocab_size)
        if len(prompt_token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"has {len(prompt_token_ids)} tokens; at most {self.max_model_len - 1} leave room for one "
                f"output token within max_model_len {self.max_model_len} ({self.max_model_len_reason})",
            )
        sampling_params.check_token_ids(self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling_params, name)
            if value is not None and value > self.max_logprobs:
                raise InvalidRequestError(name, f"must be at most {self.max_logprobs}, got {value}")


def check_count(field: str, value: Any, low: int = 1) -> None:
    """Raise ConfigError unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(field, f"must be an integer, got {value!r}")
    if operator.index(value) < low:
        raise ConfigError(field, f"must be at least {low}, got {value}")
