"""Settings of the scheduler and the KV cache, validated when they are created."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from treadle.core.errors import ConfigError, InvalidRequestError
from treadle.core.sampling_params import SamplingParams, check_token_ids
from treadle.core.settings import check_count, check_settings, setting

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The embedded model."""
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
MIN_MODEL_LEN = 2
"""One prompt token and one output token."""

PolicyChoice = str | type[Any]
"""A policy, by name or as a class."""

_scheduling = partial(setting, group="scheduling")
_requests = partial(setting, group="requests")


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    """The scheduler's settings as a user gives them. None: derived once the model is known."""

    max_model_len: int | None = _requests(
        None, "maximum tokens of prompt and output together", low=MIN_MODEL_LEN, default_text="the model's limit"
    )
    max_num_seqs: int | None = _scheduling(
        None,
        "maximum sequences that run at once",
        low=1,
        high=2**16,
        default_text=f"{DEFAULT_MAX_NUM_SEQS}, or the tokens of a step if fewer",
    )
    max_num_batched_tokens: int | None = _scheduling(
        None,
        "maximum tokens that a step computes",
        low=1,
        high=2**31 - 1,
        default_text=f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}; max_model_len if more, where prompts are computed whole",
    )
    scheduler: PolicyChoice = _scheduling(  # noqa: RUF009 - a field
        "chunked",
        "phase policy: chunked (decodes first, prompts in what is left), three-phase (the same with whole prompts), "
        "prefill-first (whole prompts, else decodes), phased (a step is all prompts or all decodes), or one of "
        "another package",
    )
    order: PolicyChoice = _scheduling(  # noqa: RUF009 - a field
        "fcfs",
        "order in which requests run: fcfs, priority, shortest-first, fair (tenants take turns), deadline, "
        "least-slack, cache-aware (longest cached prefix), or one of another package",
    )
    victim_policy: PolicyChoice = _scheduling(  # noqa: RUF009 - a field
        "last-in-rank",
        "which request is preempted first: last-in-rank, least-computed (of those behind), or one of another package",
    )
    preemption_mode: str = _scheduling(
        "auto",
        "how a preempted request gives up its blocks: recompute, swap, or auto (recompute with one sequence, swap "
        "with several); without room in the swap space it is always recomputed",
        choices=("auto", "recompute", "swap"),
    )
    admission_headroom: int = _scheduling(
        1,
        "free blocks per running sequence that an admission must leave, so that the admitted request is not "
        "preempted at the next block edge",
        low=0,
    )
    max_consecutive_prefills: int = _scheduling(
        8,
        "policies phased and prefill-first: after this many prefill steps in a row, one step goes to sequences that "
        "wait to decode",
        low=1,
    )
    long_prefill_token_threshold: int | None = _scheduling(
        None,
        "a prompt with more tokens left to compute is long: while other prompts can use the rest, it takes at most "
        "this many, and at most half, of a step's prompt tokens; 0 lets the first prompt take all it can",
        low=0,
        default_text="the tokens of a step",
    )
    age_limit_s: float | None = _scheduling(
        60.0,
        "seconds after which a waiting request goes before all that have waited less; none to disable",
        metavar="SECONDS",
    )
    max_num_queued_requests: int | None = _requests(
        None, "maximum waiting requests; the server answers 503 beyond it", low=1, default_text="no limit"
    )
    max_num_queued_tokens: int | None = _requests(
        None, "maximum prompt tokens of waiting requests", low=1, default_text="no limit"
    )
    seed: int = _requests(0, "sampling seed of requests that have none", low=0)

    def __post_init__(self) -> None:
        check_settings(self, SchedulingSettings)
        if self.age_limit_s is not None and not self.age_limit_s > 0:
            raise ConfigError("age_limit_s", f"must be greater than 0 or None, got {self.age_limit_s}")

    def scheduling(self) -> dict[str, Any]:
        """The settings of this class, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(SchedulingSettings)}


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulingSettings):
    """The scheduler's settings, complete: the user's, with all defaults resolved, and internal ones.

    Attributes:
        max_model_len, max_num_seqs, max_num_batched_tokens: as in SchedulingSettings.
        num_lookahead_slots: maximum draft tokens of a sequence that a step verifies, for speculative decoding; they
            count against the token budget, and are dropped if budget or blocks run out.
        max_loras: maximum LoRA adapters in a step.
    """

    max_model_len: int = field()
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    num_lookahead_slots: int = 0
    max_loras: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_lookahead_slots", self.num_lookahead_slots, low=0)
        check_count("max_loras", self.max_loras, low=0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every running sequence "
                f"can decode in each step; got {self.max_num_batched_tokens}",
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data; policies by name."""
        names = {name: policy_name(getattr(self, name)) for name in ("scheduler", "order", "victim_policy")}
        return asdict(self) | names

    @property
    def long_prefill_tokens(self) -> int:
        """Number of remaining tokens above which a prompt is long; 0 if no prompt is."""
        threshold = self.long_prefill_token_threshold
        return self.max_num_batched_tokens if threshold is None else threshold


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Shape of the paged KV cache.

    Attributes:
        num_blocks: blocks of the device tier.
        num_host_blocks: blocks of the host tier, which hold the KV of swapped requests.
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
        """Number of tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a single request may ask for.

    Attributes:
        max_model_len: maximum tokens of prompt and output together.
        vocab_size: number of token ids.
        max_logprobs: maximum `logprobs` and `prompt_logprobs`.
        max_model_len_reason: what set max_model_len, for the error message.
    """

    max_model_len: int
    vocab_size: int
    max_logprobs: int = 20
    max_model_len_reason: str = "the model's length"

    def check(self, prompt_token_ids: Sequence[Any], sampling_params: SamplingParams) -> None:
        """Raise InvalidRequestError, naming field, value and limit, if the request cannot be served."""
        check_prompt_length(len(prompt_token_ids), self.max_model_len, self.max_model_len_reason)
        check_token_ids("prompt_token_ids", prompt_token_ids, self.vocab_size)
        sampling_params.check_token_ids(self.vocab_size)
        num_left = self.max_model_len - len(prompt_token_ids)
        if sampling_params.min_tokens > num_left:
            raise InvalidRequestError(
                "min_tokens",
                f"must be at most {num_left}, the tokens that fit after a prompt of {len(prompt_token_ids)} "
                f"({self.max_model_len_reason}), got {sampling_params.min_tokens}",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling_params, name)
            if value is not None and value > self.max_logprobs:
                raise InvalidRequestError(name, f"must be at most {self.max_logprobs}, got {value}")


def check_prompt_length(num_tokens: int, max_model_len: int, reason: str | None = None) -> None:
    """Raise InvalidRequestError unless a prompt leaves room for an output token.

    Args:
        num_tokens: length of the prompt.
        max_model_len: maximum tokens of prompt and output together.
        reason: what set it.
    """
    if num_tokens == 0:
        raise InvalidRequestError("prompt", "is empty; it needs at least one token")
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"this model's maximum context length is {max_model_len} tokens; the prompt has {num_tokens} tokens, and "
            f"at most {max_model_len - 1} leave room for one output token" + (f" ({reason})" if reason else ""),
            code="context_length_exceeded",
        )


def policy_name(policy: str | type[Any]) -> str:
    """The name of a policy given by name or as a class."""
    return policy if isinstance(policy, str) else policy.__name__
