"""Requests and their sequences of tokens. No torch, no scheduling.

A Sequence is a view of its storage. While it waits, its tokens, counters and time are small arrays of its own; while
it runs, they are one row of the batch's arrays (`bind`), in which a step updates all rows at once.
"""

import math
from collections.abc import Sequence as AbstractSequence
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from treadle.core.lora import LoRARequest
from treadle.core.outputs import RequestMetrics
from treadle.core.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
TimeArray = npt.NDArray[np.float64]

Rank = tuple[int, float, int]
"""A request's position in every queue; smaller goes first: (0 if aged else 1, key of the order, arrival number).

It is set when the request is added and changes at most once, when it ages (not under an order by arrival).
"""

NUM_TOKENS, NUM_COMPUTED = 0, 1
"""Columns of a sequence's counters."""
NUM_COUNTERS = 2


class RequestStatus(Enum):
    """Which queue a request is in."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended; callers see these strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Grammar(Protocol):
    """A compiled, valid grammar of structured outputs.

    Attributes:
        text: the grammar's source; plans carry it, and the runner looks the compiled grammar up by it.
    """

    text: str


class Sequence:
    """One stream of tokens: the prompt and the tokens generated after it.

    Attributes:
        request: the request it belongs to.
        index: its number within the request; part of the sampling noise.
        row: its row in the batch while it runs, otherwise None.
        finish_reason: why it ended; None until then.
        stop_reason: the stop string or id that ended it.
        cumulative_logprob: sum of its tokens' log-probabilities; beam search only.
        shares: (sequence, number of tokens) whose KV this one shares and must wait for, while a group is
            recomputed; None if there is nothing to wait for.
        num_ever_computed_tokens: tokens that were computed before it last lost its blocks; recomputing them does not
            count as progress.
    """

    __slots__ = (
        "_counters",
        "_last_token_time",
        "_token_ids",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "num_ever_computed_tokens",
        "request",
        "row",
        "shares",
        "stop_reason",
    )

    def __init__(self, request: "Request", index: int, token_ids: IntArray, num_computed_tokens: int = 0) -> None:
        self.request = request
        self.index = index
        self.row: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.shares: tuple[Sequence, int] | None = None
        self.num_ever_computed_tokens = 0
        self._token_ids = token_ids
        self._last_token_time: TimeArray = np.array([math.nan])
        self._counters: IntArray = np.array([len(token_ids), num_computed_tokens], dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens known so far."""
        return int(self._counters[NUM_TOKENS])

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is written; always a prefix."""
        return int(self._counters[NUM_COMPUTED])

    @property
    def last_token_time(self) -> float:
        """When its latest token was sampled, in seconds on the engine's clock; NaN before the first."""
        return float(self._last_token_time[0])

    @last_token_time.setter
    def last_token_time(self, time: float) -> None:
        self._last_token_time[0] = time

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_to_prefill(self) -> int:
        """Number of known tokens to compute before the sequence decodes.

        This includes the last one, whose logits give the next token; except in beam search after the first
        step, where the last tokens of all beams are computed together.
        """
        beam_goes_on = self.request.sampling_params.use_beam_search and self.num_output_tokens > 0
        return self.num_tokens - beam_goes_on

    @property
    def token_ids(self) -> IntArray:
        """All tokens, int32 [num_tokens]; a view, valid until the next step."""
        return self._token_ids[: self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        token_ids: list[int] = self._token_ids[self.num_prompt_tokens : self.num_tokens].tolist()
        return token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    def bind(self, row: int, token_ids: IntArray, counters: IntArray, last_token_time: TimeArray) -> None:
        """Move into `row` of a batch: copy tokens, counters and time there and use those arrays from then on.

        Args:
            row: the row's number.
            token_ids: the row's tokens, int32 [max_model_len].
            counters: the row's counters, int32 [NUM_COUNTERS].
            last_token_time: the row's token time, float64 [1].
        """
        token_ids[: self.num_tokens] = self.token_ids
        counters[:] = self._counters
        last_token_time[:] = self._last_token_time
        self._token_ids, self._counters, self._last_token_time, self.row = token_ids, counters, last_token_time, row

    def unbind(self) -> None:
        """Leave the batch: copy tokens, counters and time into arrays of its own."""
        self._token_ids = self.token_ids.copy()
        self._counters = self._counters.copy()
        self._last_token_time = self._last_token_time.copy()
        self.row = None

    def set_num_computed_tokens(self, count: int) -> None:
        """Record that the KV of exactly the first `count` tokens is written."""
        self._counters[NUM_COMPUTED] = count

    def replace_tokens(self, token_ids: IntArray, num_computed_tokens: int) -> None:
        """Replace all tokens (beam search: one beam takes the place of another)."""
        self._token_ids[: len(token_ids)] = token_ids
        self._counters[:] = (len(token_ids), num_computed_tokens)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.index}, "
            f"{self.num_computed_tokens} of {self.num_tokens} computed)"
        )


class Request:
    """A prompt and how to continue it.

    Args:
        request_id: unique among the unfinished requests.
        prompt_token_ids: token ids, already checked against the vocabulary.
        sampling_params: how to sample and when to stop.
        stop_token_ids: every id that ends a sequence, including the model's end-of-sequence ids unless
            `ignore_eos` is set.
        seed: seed of the sampling noise, 0 to 2**64 - 1; if None, the scheduler derives one.
        arrival_time: seconds on the engine's clock.
        priority: lower goes first, under the order `priority`.
        tenant: whose share it is charged to, under the order `fair`.
        deadline: when it should finish, in seconds on the engine's clock, under the order `deadline`.
        lora: its LoRA adapter.
        cache_salt: only requests with the same salt share cached prefixes.
        prompt: the prompt's text, if it was given as text.
        grammar: constrains the output (structured outputs).

    Attributes:
        sequences: one until the prompt is computed, then `n`.
        num_reserved_seats: seats that it holds in addition to its running sequences.
        is_aged: whether it has waited longer than the age limit, and so goes before requests that have not.
    """

    __slots__ = (
        "arrival_number",
        "arrival_time",
        "cache_salt",
        "deadline",
        "error",
        "grammar",
        "is_aged",
        "lora",
        "metrics",
        "num_reserved_seats",
        "priority",
        "prompt",
        "prompt_token_ids",
        "rank",
        "request_id",
        "sampling_params",
        "seed",
        "sequences",
        "status",
        "stop_token_ids",
        "tenant",
        "waiting_since",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: AbstractSequence[int] | IntArray,
        sampling_params: SamplingParams,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        tenant: str = "",
        deadline: float = math.inf,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        prompt: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids: IntArray = np.asarray(prompt_token_ids, dtype=np.int32)
        self.sampling_params = sampling_params
        self.stop_token_ids = stop_token_ids
        wanted = sampling_params.seed if seed is None else seed
        self.seed = None if wanted is None else wanted % 2**64
        self.arrival_time = arrival_time
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.lora = lora
        self.cache_salt = cache_salt
        self.prompt = prompt
        self.grammar = grammar
        self.arrival_number = 0
        self.rank: Rank = (1, 0.0, 0)
        self.is_aged = False
        self.waiting_since = arrival_time
        self.status = RequestStatus.WAITING
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.num_reserved_seats = 0
        self.sequences = [Sequence(self, 0, self.prompt_token_ids)]

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def live_sequences(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for seq in self.sequences if not seq.is_finished]

    @property
    def is_forked(self) -> bool:
        """Whether its prompt has forked into all of its sequences."""
        return len(self.sequences) > 1 or self.sequences[0].num_output_tokens > 0

    @property
    def num_seats(self) -> int:
        """How many sequences it may run: `n` until the fork, then those that have not ended."""
        params = self.sampling_params
        return len(self.live_sequences) if self.is_forked and not params.use_beam_search else params.n

    @property
    def cache_namespace(self) -> tuple[int, int, str] | None:
        """The prefix-cache namespace; requests share KV only within one. None without adapter and salt."""
        if self.lora is None and self.cache_salt is None:
            return None
        adapter = (0, 0) if self.lora is None else (self.lora.lora_int_id, self.lora.version)
        return (*adapter, self.cache_salt or "")

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value})"
