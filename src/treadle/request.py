"""What a caller sends (Request) and the streams of tokens that it holds (Sequence). No torch, no scheduling.

A Sequence is a view on its storage. While it waits, its tokens and counters are small arrays of its own;
while it runs they are one row of the batch's arrays (`bind`), where the runner reads them and a step
updates all rows at once.
"""

from collections.abc import Sequence as AbstractSequence
from enum import Enum, StrEnum

import numpy as np
import numpy.typing as npt

from treadle.outputs import RequestMetrics
from treadle.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]

Rank = tuple[int, ...]
"""A request's place in every queue; smaller goes first. Set once, when the request is added."""

NUM_TOKENS, NUM_COMPUTED = 0, 1
"""Columns of a sequence's counters."""
NUM_COUNTERS = 2


class RequestStatus(Enum):
    """Which queue a request is in."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended; the strings are what callers see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """One stream of tokens: the prompt and what was generated after it.

    Attributes:
        request: the request it belongs to.
        index: its number within the request; part of the sampling noise.
        row: its row in the batch while it runs, else None.
        finish_reason: why it ended, None before.
        stop_reason: the stop string or id that ended it.
    """

    __slots__ = ("_counters", "_token_ids", "finish_reason", "index", "request", "row", "stop_reason")

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.index = index
        self.row: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._token_ids: IntArray = request.prompt_token_ids
        self._counters: IntArray = np.array([len(request.prompt_token_ids), 0], dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return int(self._counters[NUM_TOKENS])

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is written, always the first ones."""
        return int(self._counters[NUM_COMPUTED])

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

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
        """Whether it has ended."""
        return self.finish_reason is not None

    def bind(self, row: int, token_ids: IntArray, counters: IntArray) -> None:
        """Move into `row` of a batch: copy tokens and counters there and live in those arrays.

        Args:
            row: the row's number.
            token_ids: the row's tokens, int32 [max_model_len].
            counters: the row's counters, int32 [NUM_COUNTERS].
        """
        token_ids[: self.num_tokens] = self.token_ids
        counters[:] = self._counters
        self._token_ids, self._counters, self.row = token_ids, counters, row

    def unbind(self) -> None:
        """Leave the batch: take copies of tokens and counters along."""
        self._token_ids = self.token_ids.copy()
        self._counters = self._counters.copy()
        self.row = None

    def set_num_computed_tokens(self, count: int) -> None:
        """Say that the KV of the first `count` tokens is (still) written."""
        self._counters[NUM_COMPUTED] = count

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.num_computed_tokens} of {self.num_tokens} computed)"
        )


class Request:
    """What a caller sends: a prompt and how to continue it.

    Args:
        request_id: a name, unique among the unfinished requests.
        prompt_token_ids: token ids, already checked against the vocabulary.
        sampling_params: how to sample and when to stop.
        stop_token_ids: every id that ends a sequence, the model's end-of-sequence ids among them unless
            they are to be ignored.
        seed: of the sampling noise, 0 to 2**64 - 1; None lets the scheduler derive one.
        arrival_time: seconds on the engine's clock.
        cache_salt: prefixes are shared only among requests with the same salt.
        prompt: the prompt's text, if it was given as text.
    """

    __slots__ = (
        "arrival_number",
        "arrival_time",
        "cache_salt",
        "error",
        "metrics",
        "prompt",
        "prompt_token_ids",
        "rank",
        "request_id",
        "sampling_params",
        "seed",
        "sequences",
        "status",
        "stop_token_ids",
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
        cache_salt: str | None = None,
        prompt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids: IntArray = np.asarray(prompt_token_ids, dtype=np.int32)
        self.sampling_params = sampling_params
        self.stop_token_ids = stop_token_ids
        self.seed = sampling_params.seed if seed is None else seed
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.prompt = prompt
        self.arrival_number = 0
        self.rank: Rank = (0,)
        self.status = RequestStatus.WAITING
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.sequences = [Sequence(self, 0)]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value})"
