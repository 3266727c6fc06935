"""What only a watcher wants to know of a step: the StepReport beside the plan, and the StepOutputs after it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from treadle.core.config import CacheConfig, SchedulerConfig
from treadle.core.request import IntArray, Request, Sequence, TimeArray
from treadle.scheduler.plan import NO_NUMBERS, StepPlan, TokenLogprobs
from treadle.scheduler.state import SchedulerState

FREE, CACHED = -2, -1
"""In place of a request's number: a block with nothing in it, and one that only the prefix cache knows."""


class WaitReason(StrEnum):
    """Why a request was not admitted. The value is a stable code, for records and metrics; `text` is for people."""

    NO_FREE_BLOCKS = "no_free_blocks"
    NO_FREE_SEATS = "no_free_seats"
    NO_TOKEN_BUDGET = "no_token_budget"
    PROMPT_EXCEEDS_BUDGET = "prompt_exceeds_budget"
    TOO_MANY_ADAPTERS = "too_many_adapters"
    BEHIND_SWAPPED_REQUEST = "behind_swapped_request"
    BEHIND_WAITING_REQUEST = "behind_waiting_request"
    PREEMPTION_IN_STEP = "preemption_in_step"
    DECODE_STEP = "decode_step"

    @property
    def text(self) -> str:
        """The reason in a few words."""
        return _WAIT_REASON_TEXTS[self]


_WAIT_REASON_TEXTS = {
    WaitReason.NO_FREE_BLOCKS: "no free blocks",
    WaitReason.NO_FREE_SEATS: "no free seats",
    WaitReason.NO_TOKEN_BUDGET: "token budget used up",
    WaitReason.PROMPT_EXCEEDS_BUDGET: "the whole prompt exceeds the tokens left in this step",
    WaitReason.TOO_MANY_ADAPTERS: "the step already has max_loras adapters",
    WaitReason.BEHIND_SWAPPED_REQUEST: "a swapped request goes first",
    WaitReason.BEHIND_WAITING_REQUEST: "a waiting request goes first",
    WaitReason.PREEMPTION_IN_STEP: "blocks ran out in this step",
    WaitReason.DECODE_STEP: "this step is for decodes only",
}


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
    """A request that lost its blocks in this step, and for whom (itself, when none was behind it)."""

    request_id: str
    for_request_id: str
    mode: PreemptionMode


class RunKind(StrEnum):
    """What a sequence does in a step."""

    PREFILL = "prefill"
    REPREFILL = "re-prefill"
    DECODE = "decode"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class RunSequence:
    """A sequence in a step.

    Attributes:
        request_id, index: which sequence.
        kind: what it does.
        start, count: first position that it computes, and how many tokens.
        of: tokens to compute before it decodes, for a prefill; else tokens known.
        num_samples: tokens to sample.
    """

    request_id: str
    index: int
    kind: RunKind
    start: int
    count: int
    of: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is new since the step before."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    n: int
    priority: int
    time: float


@dataclass(frozen=True, slots=True, eq=False)
class BlockHolders:
    """Who holds which block of the device tier.

    Attributes:
        holders: int32 [num_blocks], a request's arrival number, FREE or CACHED. A block that several sequences share
            is told under the first of their requests in rank.
        is_shared: bool [num_blocks].
        names: arrival number → request.
    """

    holders: IntArray
    is_shared: npt.NDArray[np.bool_]
    names: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class StepDetails:
    """The state of queues and blocks as a step was planned; only made if an observer wants it.

    Attributes:
        ran: the sequences in the step, in the plan's order.
        waiting, swapped: requests in the order in which they go.
        running: running requests in rank order.
        arrived: requests that were added since the step before, those that have ended since among them.
        num_blocks: how many blocks are in which state, see `count_blocks`.
        holders: who holds which block.
    """

    ran: tuple[RunSequence, ...]
    waiting: tuple[str, ...]
    swapped: tuple[str, ...]
    running: tuple[str, ...]
    arrived: tuple[Arrival, ...]
    num_blocks: dict[str, int]
    holders: BlockHolders


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Lengths of the queues and use of the KV cache at one moment.

    Attributes:
        num_waiting_requests, num_running_requests, num_swapped_requests: requests in each queue.
        num_running_sequences: sequences of the running requests.
        kv_cache_usage: fraction of the device tier that sequences hold, 0 to 1.
        num_blocks: blocks by state, see `count_blocks`.
        num_prefix_queries, num_prefix_hits: tokens looked up and found in the prefix cache so far.
    """

    num_waiting_requests: int
    num_running_requests: int
    num_swapped_requests: int
    num_running_sequences: int
    kv_cache_usage: float
    num_blocks: dict[str, int]
    num_prefix_queries: int
    num_prefix_hits: int


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerSnapshot:
    """Queues and blocks between two steps. The requests are the live ones: read them before the next step.

    Attributes:
        time: seconds on the engine's clock.
        step: number of the latest step.
        waiting, running, swapped: requests of each queue in rank order.
        num_blocks: blocks by state, see `count_blocks`.
        holders: who holds which block.
        config, cache_config: the scheduler's settings.
    """

    time: float
    step: int
    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    swapped: tuple[Request, ...]
    num_blocks: dict[str, int]
    holders: BlockHolders
    config: SchedulerConfig
    cache_config: CacheConfig


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """What the scheduler did in planning a step, and why.

    Attributes:
        plan: the step.
        time: seconds on the engine's clock when it was planned.
        preempted: who lost its blocks while the step was planned.
        swapped_in: who came back from the host tier.
        ignored: who was ended with an error, because it cannot go on even alone.
        refusals: who was looked at and has to wait, and why.
        num_waiting: requests in the waiting queue after planning.
        num_running: sequences that run after planning.
        num_used_blocks: blocks of the device tier that sequences hold after planning.
        details: queues and blocks, if an observer wants them.
    """

    plan: StepPlan
    time: float
    preempted: tuple[Preemption, ...] = ()
    swapped_in: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    num_waiting: int = 0
    num_running: int = 0
    num_used_blocks: int = 0
    details: StepDetails | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """What a step changed.

    Attributes:
        sequences: object [n], the sequences that got a token; with drafts one may get several, in order.
        token_ids: int32 [n], the tokens.
        logprobs: place in `sequences` → log-probabilities, for sequences that asked.
        prompt_logprobs: request, position of the first token, log-probabilities of the tokens from there.
        num_generated_tokens: tokens that the step generated; each beam that goes on or ends has generated one.
        num_prompt_tokens: prompt tokens computed for the first time.
        num_recomputed_tokens: known tokens computed again after a preemption.
        num_cached_tokens: prompt tokens of newly admitted requests that the prefix cache held.
        token_gaps: float64 [m], seconds since the token before, for sequences that had one.
        first_token_waits: seconds from arrival to the first token, for requests that got it.
    """

    sequences: npt.NDArray[np.object_]
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[tuple[Request, int, tuple[TokenLogprobs, ...]], ...] = ()
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    token_gaps: TimeArray = field(default_factory=lambda: np.empty(0))
    first_token_waits: tuple[float, ...] = ()

    @staticmethod
    def nothing() -> "StepOutputs":
        """Of a step that changed nothing."""
        return StepOutputs(np.empty(0, dtype=np.object_), NO_NUMBERS)


def describe_step(state: SchedulerState, plan: StepPlan, arrived: Iterable[Request]) -> StepDetails:
    """The details of a step that has just been planned.

    Args:
        state: of the scheduler, before the step runs.
        plan: the step.
        arrived: requests that were added since the step before.
    """
    return StepDetails(
        ran=tuple(_describe_entry(state, plan, i) for i in range(len(plan.rows))),
        waiting=tuple(request.request_id for request in state.waiting),
        swapped=tuple(request.request_id for request in state.swapped),
        running=tuple(request.request_id for request in state.batch.running_requests()),
        arrived=tuple(_describe_arrival(request) for request in arrived),
        num_blocks=count_blocks(state),
        holders=block_holders(state),
    )


def _describe_entry(state: SchedulerState, plan: StepPlan, entry: int) -> RunSequence:
    seq: Sequence = state.batch.sequences[plan.rows[entry]]
    of = seq.num_tokens
    if entry < plan.num_prefills:
        kind = RunKind.REPREFILL if seq.num_output_tokens else RunKind.PREFILL
        of = seq.num_tokens_to_prefill
    else:
        kind = RunKind.DECODE if entry < plan.num_prefills + plan.num_decodes else RunKind.BEAM
    start, count, num_samples = int(plan.starts[entry]), int(plan.counts[entry]), int(plan.samples[entry])
    return RunSequence(seq.request.request_id, seq.index, kind, start, count, of, num_samples)


def _describe_arrival(request: Request) -> Arrival:
    params = request.sampling_params
    num_prompt_tokens = len(request.prompt_token_ids)
    return Arrival(
        request.request_id, num_prompt_tokens, params.max_tokens, params.n, request.priority, request.arrival_time
    )


def count_blocks(state: SchedulerState) -> dict[str, int]:
    """How many blocks of the two tiers are in which state: referenced, cached, free, host_used, host_free."""
    pool, host = state.kv.pool, state.kv.host_pool
    return {
        "referenced": pool.num_blocks - pool.num_available,
        "cached": pool.num_cached_idle,
        "free": pool.num_available - pool.num_cached_idle,
        "host_used": host.num_blocks - host.num_available,
        "host_free": host.num_available,
    }


def block_holders(state: SchedulerState) -> BlockHolders:
    """Who holds which block of the device tier now."""
    kv, batch = state.kv, state.batch
    holders: IntArray = np.full(kv.pool.num_blocks, FREE, dtype=np.int32)
    holders[kv.pool.cached_idle_block_ids()] = CACHED
    names = {}
    for row in batch.rows[::-1].tolist():
        request = batch.sequences[row].request
        names[request.arrival_number] = request.request_id
        holders[kv.block_tables[row, : kv.num_blocks[row]]] = request.arrival_number
    return BlockHolders(holders, kv.pool.ref_counts > 1, names)
