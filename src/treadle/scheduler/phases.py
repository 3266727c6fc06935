"""The phases of a step. A phase policy says which of them run, in which order.

Every request runs at its rank: a request never loses blocks to one behind it.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from treadle.clock import Clock
from treadle.config import SchedulerConfig
from treadle.kvcache import AllocStatus, KVCacheManager
from treadle.request import IntArray, Request, RequestStatus, Sequence
from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.plan import Preemption, Refusal, ScheduledSequence, StepPlan, WaitReason
from treadle.scheduler.queue import RankedQueue

MAX_HEADROOM_DOUBLINGS = 16
"""Admission headroom doubles with each preemption; beyond this it exceeds every pool anyway."""


class Cut(Enum):
    """Which prompts may be computed in parts."""

    ANY = "any"
    ONLY_FIRST = "only the first sequence of the step"


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """The state in which a request found too few blocks. Until it changes for the better, so it stays."""

    request: Request
    num_available_blocks: int
    num_running: int
    cache_version: int


@dataclass(slots=True)
class SchedulerState:
    """The queues and what the phases need to work on them; owned by the Scheduler."""

    config: SchedulerConfig
    clock: Clock
    kv: KVCacheManager
    batch: RunningBatch
    waiting: RankedQueue
    block_refusal: BlockRefusal | None = None


class Phases:
    """One step in the making. Each phase takes what it can get of the budget that is left.

    Attributes:
        remaining_tokens: what is left of the token budget.
        sequences: prompts and parts of prompts in the step so far.
        decode_rows: plain decodes in the step so far.
        preempted: who lost its blocks in this step.
        refusal: the first waiting request and why it was not admitted.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.remaining_tokens = state.config.max_num_batched_tokens
        self.sequences: list[ScheduledSequence] = []
        self.decode_rows: IntArray = np.empty(0, dtype=np.int32)
        self.preempted: list[Preemption] = []
        self.refusal: Refusal | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the step so far."""
        return not self.sequences and not len(self.decode_rows)

    @property
    def num_decoding(self) -> int:
        """Running sequences that wait to decode."""
        batch = self._state.batch
        return len(batch) - batch.num_prefilling

    def plan(self, step: int) -> StepPlan:
        """Close the step."""
        state = self._state
        first = state.waiting.first()
        if first is not None and (self.refusal is None or self.refusal.request_id != first.request_id):
            reason = WaitReason.PREEMPTION if self.preempted else WaitReason.DECODE_STEP
            self.refusal = Refusal(first.request_id, reason)
        self.decode_rows.flags.writeable = False
        return StepPlan(
            step=step,
            sequences=tuple(self.sequences),
            decode_rows=self.decode_rows,
            batch=state.batch,
            block_tables=state.kv.block_tables,
            preempted=tuple(self.preempted),
            refusal=self.refusal,
            num_waiting=len(state.waiting),
            running_queue_size=len(state.batch),
        )

    # Decodes

    def decodes(self) -> None:
        """Every sequence whose prompt is computed decodes one token.

        Where blocks run out, sequences get theirs in rank order, by preempting the last in rank.
        """
        batch, kv = self._state.batch, self._state.kv
        rows = batch.decoding_rows()
        growing = kv.rows_to_grow(rows, batch.num_tokens[rows])
        if len(growing) <= kv.num_available_blocks:
            if len(growing):
                kv.append(growing)
        else:
            for seq in list(batch.sequences[growing]):
                if seq.row is not None and self._make_room_for(seq):
                    kv.append(np.array([seq.row], dtype=np.int32))
            rows = batch.decoding_rows()
        self.decode_rows = rows
        self.remaining_tokens -= len(rows)

    def _make_room_for(self, seq: Sequence) -> bool:
        """Preempt, last in rank first, until a block is available for `seq`; False if it fell itself."""
        state = self._state
        while state.kv.num_available_blocks == 0:
            victim = self._victim_for(seq)
            if victim is None:
                self._preempt(seq.request, for_request=seq.request)
                return False
            self._preempt(victim, for_request=seq.request)
        return True

    def _victim_for(self, seq: Sequence) -> Request | None:
        # Those strictly behind `seq` are not in this plan yet: sequences get their blocks in rank order.
        for behind in self._state.batch.sequences_behind(seq):
            assert behind.row is not None
            if self._state.kv.frees_a_block(behind.row):
                return behind.request
        return None

    def _preempt(self, request: Request, for_request: Request) -> None:
        """Free the request's blocks, keep its output, and return it to waiting at its rank."""
        state = self._state
        for seq in request.sequences:
            state.kv.free(seq)
            state.batch.remove(seq)
            seq.set_num_computed_tokens(0)
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        state.waiting.add(request)
        self.preempted.append(Preemption(request.request_id, for_request.request_id))

    # Chunks

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Sequences whose prompt is partly computed go on with it. Their blocks are already theirs."""
        for seq in self._state.batch.prefilling_sequences():
            left = seq.num_tokens - seq.num_computed_tokens
            if self._why_no_tokens(left, cut) is not None:
                break
            self._schedule_prompt(seq, min(left, self.remaining_tokens))

    # Admissions

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Waiting requests start, in rank order, until the first one that cannot."""
        state = self._state
        while (request := state.waiting.first()) is not None:
            reason = WaitReason.PREEMPTION if self.preempted else self._admit(request, cut)
            if reason is not None:
                self.refusal = Refusal(request.request_id, reason)
                break

    def _admit(self, request: Request, cut: Cut) -> WaitReason | None:
        """Move `request` from waiting to running with its first tokens, or say why not now."""
        state = self._state
        (seq,) = request.sequences
        if state.batch.num_free_rows < 1:
            return WaitReason.NO_SEAT
        if self.remaining_tokens <= 0:
            return WaitReason.NO_BUDGET
        if self._is_still_refused(request):
            return WaitReason.NO_BLOCKS
        prefix = state.kv.find_prefix(seq)
        num_cached = len(prefix.blocks) * state.kv.block_size
        reason = self._why_no_tokens(seq.num_tokens - num_cached, cut)
        if reason is not None:
            return reason
        if state.kv.can_allocate(seq, prefix, self._headroom(request)) is not AllocStatus.OK:
            state.block_refusal = BlockRefusal(
                request, state.kv.num_available_blocks, len(state.batch), state.kv.version
            )
            return WaitReason.NO_BLOCKS
        state.waiting.remove(request)
        assert request.seed is not None
        params = request.sampling_params
        token_limit = state.config.max_model_len
        if params.max_tokens is not None:
            token_limit = min(token_limit, seq.num_prompt_tokens + params.max_tokens)
        row = state.batch.add(seq, request.seed, token_limit)
        seq.set_num_computed_tokens(state.kv.allocate(seq, row, prefix))
        request.status = RequestStatus.RUNNING
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = state.clock.now()
            request.metrics.num_cached_tokens = num_cached
        self._schedule_prompt(seq, min(seq.num_tokens - num_cached, self.remaining_tokens))
        return None

    def _headroom(self, request: Request) -> int:
        """Blocks to leave free: more for who was thrown out before, none when nothing else runs."""
        doublings = min(request.metrics.num_preemptions, MAX_HEADROOM_DOUBLINGS)
        return int(self._state.config.admission_headroom * len(self._state.batch) << doublings)

    def _is_still_refused(self, request: Request) -> bool:
        """Whether nothing has changed for the better since `request` was refused for lack of blocks."""
        state, last = self._state, self._state.block_refusal
        return (
            last is not None
            and last.request is request
            and state.kv.num_available_blocks <= last.num_available_blocks
            and len(state.batch) >= last.num_running
            and state.kv.version == last.cache_version
        )

    def _why_no_tokens(self, needed: int, cut: Cut) -> WaitReason | None:
        """Why none of `needed` prompt tokens can be computed in what is left of the step."""
        if self.remaining_tokens <= 0:
            return WaitReason.NO_BUDGET
        if needed > self.remaining_tokens and cut is Cut.ONLY_FIRST and not self.is_empty:
            return WaitReason.NOT_WHOLE
        return None

    def _schedule_prompt(self, seq: Sequence, count: int) -> None:
        assert seq.row is not None
        start = seq.num_computed_tokens
        is_last = start + count == seq.num_tokens
        self.sequences.append(
            ScheduledSequence(seq.request.request_id, seq.row, start, count, num_samples=int(is_last))
        )
        self.remaining_tokens -= count
