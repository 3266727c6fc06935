"""The whole contract between scheduler and runner: a StepPlan goes in, a StepResult comes back."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from treadle.request import IntArray, Request, Sequence
from treadle.scheduler.batch import RunningBatch


class WaitReason(Enum):
    """Why the first waiting request was not admitted; those behind it wait for it."""

    NO_BLOCKS = "no free blocks"
    NO_SEAT = "no free seat"
    NO_BUDGET = "token budget used up"
    NOT_WHOLE = "prompt does not fit the rest of the budget"
    PREEMPTION = "a preemption in this step"
    DECODE_STEP = "decode step"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first waiting request and why it has to go on waiting."""

    request_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that lost its blocks in this step, and for whom (itself, when nobody was behind it)."""

    request_id: str
    for_request_id: str


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence in the step that is not a plain decode: a prompt, or a part of one.

    Attributes:
        request_id: whose it is.
        row: its row in the batch.
        start: position of the first token to compute; everything before it is computed.
        count: tokens to compute.
        num_samples: tokens to sample after the last one; 0 while more of the prompt is to come.
    """

    request_id: str
    row: int
    start: int
    count: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs.

    Attributes:
        step: number of the step, from 1.
        sequences: prompts and parts of prompts, computed first.
        decode_rows: int32 [n], rows that compute their last token and sample the next one.
        batch: the rows' arrays; they do not change until `update`.
        block_tables: int32 [rows, max_blocks], block ids by row.
        preempted: who lost its blocks while the step was planned.
        refusal: who waits first, and why.
        num_waiting: requests in the waiting queue after planning.
        running_queue_size: requests in the running queue after planning.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    decode_rows: IntArray
    batch: RunningBatch
    block_tables: IntArray
    preempted: tuple[Preemption, ...] = ()
    refusal: Refusal | None = None
    num_waiting: int = 0
    running_queue_size: int = 0

    @property
    def num_prefill_groups(self) -> int:
        """Requests in the step that compute prompt tokens."""
        return len(self.sequences)

    @property
    def num_batched_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_rows) + sum(s.count for s in self.sequences)

    @property
    def is_empty(self) -> bool:
        """Whether the step runs nothing."""
        return not self.sequences and not len(self.decode_rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's unmodified logits.

    Attributes:
        token_id: the token that stands there.
        logprob: its log-probability.
        rank: 1 if no token is more likely.
        top_token_ids: the most likely tokens, best first.
        top_logprobs: their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """The runner's answer for one ScheduledSequence.

    Attributes:
        token_ids: the sampled tokens, `num_samples` of them.
        prompt_logprobs: for the tokens at positions start + 1 … of the prompt, as far as this part
            reaches; empty unless the request asked.
    """

    token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer to a StepPlan, in the plan's order.

    Attributes:
        sequences: one per entry of `plan.sequences`.
        decode_token_ids: int32 [len(plan.decode_rows)], sampled tokens.
        logprobs: row → log-probabilities of the row's sampled token, for rows that asked.
    """

    sequences: tuple[SequenceResult, ...]
    decode_token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @staticmethod
    def nothing() -> "StepResult":
        """The answer to an empty plan."""
        return StepResult((), np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step changed, for whoever turns tokens into answers.

    Attributes:
        sequences: object [n], the sequences that got a token.
        token_ids: int32 [n], the tokens.
        logprobs: log-probabilities of new tokens, for sequences that asked.
        prompt_logprobs: request, position of the first token, log-probabilities of the tokens from there.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: IntArray
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
