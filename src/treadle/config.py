"""Settings of the scheduler and the cache, checked once when they are made. Derived sizes are new values."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from treadle.errors import ConfigError, InvalidRequestError
from treadle.sampling_params import SamplingParams, check_token_ids

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and choices of the scheduler.

    Attributes:
        max_model_len: most tokens of one sequence, prompt and output together.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens that one step computes.
        policy: the phase policy by name.
        admission_headroom: free blocks that an admission leaves per running sequence, so that the
            newcomer is not thrown out at the next block edge.
        max_consecutive_prefills: policy `phased` only: after this many prefill steps in a row, sequences
            that wait to decode get a step.
        seed: of requests that bring none of their own.
    """

    max_model_len: int
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    policy: str = "chunked"
    admission_headroom: int = 1
    max_consecutive_prefills: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("max_model_len", self.max_model_len, low=2)
        check_count("max_num_seqs", self.max_num_seqs)
        check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        check_count("admission_headroom", self.admission_headroom, low=0)
        check_count("max_consecutive_prefills", self.max_consecutive_prefills)
        check_count("seed", self.seed, low=0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running sequence can "
                f"decode in each step; got {self.max_num_batched_tokens}",
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Shape of the paged KV cache.

    Attributes:
        num_blocks: blocks of the device tier.
        block_size: token slots of a block.
        enable_prefix_caching: whether finished blocks stay findable for other requests.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_count("num_kv_blocks", self.num_blocks)
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
