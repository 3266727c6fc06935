"""The whole contract between scheduler and runner: a StepPlan goes in, a StepResult comes back."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

import numpy as np
import numpy.typing as npt

from treadle.request import IntArray, Request, Sequence
from treadle.scheduler.batch import RunningBatch


class WaitReason(Enum):
    """Why a request was not admitted."""

    NO_BLOCKS = "no free blocks"
    NO_SEAT = "no free seat"
    NO_BUDGET = "token budget used up"
    NOT_WHOLE = "prompt does not fit the rest of the budget"
    ADAPTER = "too many adapters"
    SWAPPED_FIRST = "a swapped request is before it"
    PREEMPTION = "a preemption in this step"
    DECODE_STEP = "decode step"


class PreemptionMode(StrEnum):
    """How a request gives up its blocks: to be computed again, or moved to the host tier."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was looked at and has to go on waiting, and why; those behind it wait for it."""

    request_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request that lost its blocks in this step, and for whom (itself, when nobody was behind it)."""

    request_id: str
    for_request_id: str
    mode: PreemptionMode


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence in the step that is not a plain decode: a prompt, a part of one, or a beam.

    Attributes:
        request_id: whose it is.
        row: its row in the batch.
        start: position of the first token to compute; everything before it is computed.
        count: tokens to compute.
        num_samples: tokens to sample after the last one: 0 while more is to be computed, several where a
            prompt forks.
        num_candidates: most likely next tokens to report with their log-probabilities (beam search).
        is_prefill: whether it computes tokens known at its admission.
    """

    request_id: str
    row: int
    start: int
    count: int
    num_samples: int = 0
    num_candidates: int = 0
    is_prefill: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs.

    Block moves are done first, in this order: swap-outs, swap-ins, copies.

    Attributes:
        step: number of the step, from 1.
        sequences: prompts and parts of prompts, then beams.
        decode_rows: int32 [n], rows that compute their last token and sample the next one.
        batch: the rows' arrays; they do not change until `update`.
        block_tables: int32 [rows, max_blocks], block ids by row.
        num_lookahead_slots: slots after the next token that each decoding row may write.
        blocks_to_swap_out: (device block, host block).
        blocks_to_swap_in: (host block, device block).
        blocks_to_copy: (device block, device block).
        preempted: who lost its blocks while the step was planned.
        swapped_in: who came back from the host tier.
        ignored: who was ended with an error, because it cannot go on even alone.
        refusals: who was looked at and has to wait, and why.
        num_waiting: requests in the waiting queue after planning.
        running_queue_size: requests in the running queue after planning.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    decode_rows: IntArray
    batch: RunningBatch
    block_tables: IntArray
    num_lookahead_slots: int = 0
    blocks_to_swap_out: tuple[tuple[int, int], ...] = ()
    blocks_to_swap_in: tuple[tuple[int, int], ...] = ()
    blocks_to_copy: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Preemption, ...] = ()
    swapped_in: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    num_waiting: int = 0
    running_queue_size: int = 0

    @property
    def num_prefill_groups(self) -> int:
        """Sequences in the step that compute prompt tokens."""
        return sum(s.is_prefill for s in self.sequences)

    @property
    def num_batched_tokens(self) -> int:
        """Tokens that the step computes, lookahead slots included."""
        return len(self.decode_rows) * (1 + self.num_lookahead_slots) + sum(s.count for s in self.sequences)

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
        token_ids: the sampled tokens, `num_samples` of them, for the request's sequences in their order.
        logprobs: one per token, if the request asked.
        candidates: (token, log-probability), best first, `num_candidates` of them.
        prompt_logprobs: for the tokens at positions start + 1 … of the prompt, as far as this part
            reaches; empty unless the request asked.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer to a StepPlan, in the plan's order.

    Attributes:
        sequences: one per entry of `plan.sequences`.
        decode_token_ids: int32 [len(plan.decode_rows)], sampled tokens; with lookahead slots
            [len(plan.decode_rows), 1 + num_lookahead_slots].
        num_accepted: int32 [len(plan.decode_rows)], with lookahead slots: how many of each row's tokens
            count, at least 1. The KV of all but the last of them is in place.
        logprobs: row → log-probabilities of the row's sampled token, for rows that asked.
        errors: sequences whose requests cannot go on, and why.
    """

    sequences: tuple[SequenceResult, ...]
    decode_token_ids: IntArray
    num_accepted: IntArray | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: tuple[tuple[Sequence, str], ...] = ()

    @staticmethod
    def nothing() -> "StepResult":
        """The answer to an empty plan."""
        return StepResult((), np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step changed, for whoever turns tokens into answers.

    Attributes:
        sequences: object [n], the sequences that got a token; with lookahead one may get several, in order.
        token_ids: int32 [n], the tokens.
        logprobs: place in `sequences` → log-probabilities, for sequences that asked.
        prompt_logprobs: request, position of the first token, log-probabilities of the tokens from there.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)
