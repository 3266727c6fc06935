"""Data for observers: the StepReport that accompanies a plan, and the StepOutputs after the step."""

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
"""Stand for a request's arrival number: an unused block, and a block that only the prefix cache references."""


class WaitReason(StrEnum):
    """Why a request was not admitted. The value is a stable code for records and metrics; `text` is for display."""

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
        """The reason in a few words, for display."""
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
    """What happens to the KV of a preempted request: it is computed again later, or moved to the host tier."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was considered for the step and has to wait, with the reason."""

    request_id: str
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Preemption:
    """A preempted request, and the request that needed its blocks (itself if no victim was behind it in rank)."""

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
        request_id, index: the request, and the index of the sequence in it.
        kind: what the sequence does.
        start, count: position of the first computed token, and number of computed tokens.
        of: for a prefill, the number of tokens to compute before the sequence decodes; else the number of known
            tokens.
        num_samples: number of tokens to sample.
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
    """A request that arrived after the previous step was planned."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    n: int
    priority: int
    time: float


@dataclass(frozen=True, slots=True, eq=False)
class BlockHolders:
    """Which request holds each block of the device tier.

    Attributes:
        holders: int32 [num_blocks], the arrival number of a request, FREE or CACHED. For a shared block this is the
            first in rank of the requests that share it.
        is_shared: bool [num_blocks], whether several block tables contain the block.
        names: arrival number → request id.
    """

    holders: IntArray
    is_shared: npt.NDArray[np.bool_]
    names: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class StepDetails:
    """Queues and blocks when a step was planned; collected only if an observer wants them.

    Attributes:
        ran: the sequences in the step, in the plan's order.
        waiting, swapped, running: ids of the requests in each queue, in rank order.
        arrived: requests that were added since the previous step, including those that have ended already.
        num_blocks: number of blocks in each state, see `count_blocks`.
        holders: which request holds each block.
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
    """Queue lengths and usage of the KV cache at one moment.

    Attributes:
        num_waiting_requests, num_running_requests, num_swapped_requests: number of requests in each queue.
        num_running_sequences: number of sequences of the running requests.
        kv_cache_usage: fraction of the device blocks that sequences hold, 0 to 1.
        num_blocks: number of blocks in each state, see `count_blocks`.
        num_prefix_queries, num_prefix_hits: tokens looked up and tokens found in the prefix cache so far.
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
    """Queues and blocks between two steps. The requests are live objects, so read them before the next step.

    Attributes:
        time: seconds on the engine's clock.
        step: number of the latest step.
        waiting, running, swapped: requests of each queue, in rank order.
        num_blocks: number of blocks in each state, see `count_blocks`.
        holders: which request holds each block.
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
    """What the scheduler decided when it planned a step, and why.

    Attributes:
        plan: the step.
        time: seconds on the engine's clock when the step was planned.
        preempted: requests that lost their blocks.
        swapped_in: ids of the requests that were swapped in.
        ignored: ids of the requests that ended with an error because they cannot continue even alone.
        refusals: requests that were considered and have to wait, with the reasons.
        num_waiting: number of waiting requests after planning.
        num_running: number of running sequences after planning.
        num_used_blocks: number of device blocks that sequences hold after planning.
        details: queues and blocks; None unless an observer wants them.
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
        sequences: object [n], the sequence of each new token; with drafts, a sequence may have several in a row.
        token_ids: int32 [n], the new tokens.
        logprobs: index into `sequences` → log-probabilities, for sequences that request them.
        prompt_logprobs: (request, position of the first token, log-probabilities from that position on).
        num_generated_tokens: number of generated tokens; each beam that continues or ends counts one.
        num_prompt_tokens: number of prompt tokens computed for the first time.
        num_recomputed_tokens: number of known tokens computed again after a preemption.
        num_cached_tokens: number of prompt tokens found in the prefix cache, over newly admitted requests.
        token_gaps: float64 [m], seconds between a token and the previous one of its sequence.
        first_token_waits: seconds from arrival to first token, for requests that got their first token.
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
        """Return the outputs of a step that changed nothing."""
        return StepOutputs(np.empty(0, dtype=np.object_), NO_NUMBERS)


def describe_step(state: SchedulerState, plan: StepPlan, arrived: Iterable[Request]) -> StepDetails:
    """Return the details of a step that was just planned.

    Args:
        state: the scheduler's state, before the step runs.
        plan: the step.
        arrived: requests that were added since the previous step.
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
    """Return the number of blocks in each state: referenced, cached, free, host_used, host_free."""
    pool, host = state.kv.pool, state.kv.host_pool
    return {
        "referenced": pool.num_blocks - pool.num_available,
        "cached": pool.num_cached_idle,
        "free": pool.num_available - pool.num_cached_idle,
        "host_used": host.num_blocks - host.num_available,
        "host_free": host.num_available,
    }


def block_holders(state: SchedulerState) -> BlockHolders:
    """Return which request holds each block of the device tier now."""
    kv, batch = state.kv, state.batch
    holders: IntArray = np.full(kv.pool.num_blocks, FREE, dtype=np.int32)
    holders[kv.pool.cached_idle_block_ids()] = CACHED
    names = {}
    for row in batch.rows[::-1].tolist():
        request = batch.sequences[row].request
        names[request.arrival_number] = request.request_id
        holders[kv.block_tables[row, : kv.num_blocks[row]]] = request.arrival_number
    return BlockHolders(holders, kv.pool.ref_counts > 1, names)
