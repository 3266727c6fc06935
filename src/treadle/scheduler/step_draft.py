"""A step being built: what it runs so far, and which requests were preempted, swapped in or refused."""

from dataclasses import dataclass

import numpy as np

from treadle.core.request import FinishReason, IntArray, Request, Sequence
from treadle.kvcache import BlockPairs
from treadle.scheduler import lifecycle
from treadle.scheduler.batch import BoolArray, rows_of
from treadle.scheduler.beams import num_candidates
from treadle.scheduler.plan import NO_MOVES, NO_NEW_BLOCKS, NO_NUMBERS, BlockMoves, NewBlocks, StepPlan, ones
from treadle.scheduler.report import Preemption, PreemptionMode, Refusal, StepReport, WaitReason
from treadle.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Part:
    """Known tokens of a sequence that the step computes: a prompt or a chunk of one.

    Attributes:
        seq: the sequence.
        start, count: position of the first token, and number of tokens.
        num_samples: number of tokens to sample: 0 if known tokens remain to be computed, several at a fork.
        num_candidates: number of most likely next tokens to report (beam search).
        cost: tokens of the budget that it takes.
    """

    seq: Sequence
    start: int
    count: int
    num_samples: int
    num_candidates: int
    cost: int


SCORED_TOKEN_COST = 8
"""Cost, in tokens of the budget, of a prompt token whose log-probabilities the request asks for (`prompt_logprobs`).

Such a token needs a row of logits, as a sampled token does, and a ranking of the vocabulary. In time it costs 1.3
plain tokens (SmolLM2-135M, int8, 2 cores, prompts of 900 tokens with 20 log-probabilities each: 0.58 ms against
0.46 ms). The cost is higher to keep steps short for the requests that decode, because short chunks cost little here.
With 512 tokens a step, the longest step takes 320 ms at a cost of 1, 190 ms at 2, 62 ms at 8 and 25 ms at 16; four
prompts take 2.09, 2.13, 2.21 and 2.25 s in all.
"""


class StepDraft:
    """What the phases have added to a step so far.

    Attributes:
        state: queues, rows and blocks.
        remaining_tokens: number of tokens left in the budget.
        parts: prompts and chunks of prompts.
        decode_rows: int32 [n], rows that decode, beams excluded.
        preempted: requests that have lost their blocks in this step.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.remaining_tokens = state.config.max_num_batched_tokens
        self.parts: list[Part] = []
        self.decode_rows: IntArray = NO_NUMBERS
        self.preempted: list[Preemption] = []
        self._num_drafts: dict[int, int] = {}  # row → number of drafted tokens, in the order of decode_rows
        self._beams: IntArray = NO_NUMBERS
        self._swapped_in: list[str] = []
        self._ignored: list[str] = []
        self._refusals: dict[str, Refusal] = {}  # request id → its latest refusal
        self._swap_outs: BlockPairs = []
        self._swap_ins: BlockPairs = []
        self._copies: dict[Request, BlockPairs] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the step runs nothing so far."""
        return not self.parts and not len(self.decode_rows) and not len(self._beams)

    def rows_in_step(self) -> BoolArray:
        """Return which rows are in the step: bool [rows]."""
        is_in_step: BoolArray = np.zeros(self.state.config.max_num_seqs, dtype=np.bool_)
        is_in_step[self.decode_rows] = True
        is_in_step[self._beams] = True
        for part in self.parts:
            is_in_step[part.seq.row] = True
        return is_in_step

    # Prompts

    def add_prompt(self, seq: Sequence, limit: int, *, is_whole: bool = False) -> None:
        """Compute the next known tokens of a sequence.

        Args:
            seq: the sequence.
            limit: maximum cost, in tokens of the budget.
            is_whole: whether the known tokens must not be cut; the caller has made sure that they fit.
        """
        request = seq.request
        params = request.sampling_params
        assert seq.row is not None
        start = seq.num_computed_tokens
        count = min(seq.num_tokens_to_prefill - start, limit)
        cost = count
        if params.prompt_logprobs is not None and start + 1 < seq.num_prompt_tokens:
            if not is_whole:
                count = min(count, max(1, limit // SCORED_TOKEN_COST))
            cost = min(count * SCORED_TOKEN_COST, self.remaining_tokens)
        is_last = start + count == seq.num_tokens
        samples = candidates = 0
        if is_last and params.use_beam_search:
            candidates = self._num_candidates(seq)
        elif is_last:
            samples = 1 if request.is_forked else params.n
        self.parts.append(Part(seq, start, count, samples, candidates, cost))
        self.remaining_tokens -= cost

    def take_back(self, seq: Sequence) -> None:
        """Remove the sequence's chunk from the step, if there is one, so that a larger chunk can replace it."""
        for place, part in enumerate(self.parts):
            if part.seq is seq:
                self.remaining_tokens += self.parts.pop(place).cost
                return

    # Decodes

    def add_decodes(self, rows: IntArray) -> None:
        """Add decodes, with as many drafted tokens as fit.

        Args:
            rows: int32 [n]; the blocks for their next tokens are allocated.
        """
        batch = self.state.batch
        self.remaining_tokens -= len(rows)
        if batch.has_beams:
            is_beam = batch.is_beam[rows]
            self._beams = np.concatenate([self._beams, rows[is_beam]])
            rows = rows[~is_beam]
        self.decode_rows = np.concatenate([self.decode_rows, rows]) if len(self.decode_rows) else rows
        if batch.drafts:
            self._take_drafts(rows)

    def _take_drafts(self, rows: IntArray) -> None:
        """Add the drafted tokens of `rows` to the step, as far as the budget and the free blocks allow.

        Drafted tokens that do not fit are dropped: they never preempt a request or end a sequence early.
        """
        batch, kv, most = self.state.batch, self.state.kv, self.state.config.num_lookahead_slots
        for i, row in enumerate(rows.tolist()):
            draft = batch.drafts.get(row)
            if draft is None:
                continue
            num_tokens = int(batch.num_tokens[row])
            # The last token of a sequence needs no KV.
            room = int(batch.token_limits[row]) - num_tokens - 1
            count = min(len(draft), most, room, self.remaining_tokens)
            one = rows[i : i + 1]
            missing = kv.missing_blocks(one, batch.num_tokens[one] + count)
            if missing[0] > kv.num_available_blocks:
                count = int(kv.num_tokens_covered[row]) - num_tokens
            elif missing[0]:
                kv.append(one, missing)
            if count > 0:
                self._num_drafts[row] = count
                self.remaining_tokens -= count

    def grow(self, request: Request, sequences: list[Sequence]) -> None:
        """Allocate the blocks that sequences of one request need to decode; the caller has made sure they fit."""
        kv, batch = self.state.kv, self.state.batch
        rows = rows_of(sequences)
        missing = kv.missing_blocks(rows, batch.num_tokens[rows])
        if missing.any():
            kv.append(rows[missing > 0], missing[missing > 0])
        if request.sampling_params.n > 1:
            pairs = [pair for seq in sequences for pair in kv.copy_shared_tail(seq, seq.num_computed_tokens)]
            if pairs:
                self._copies[request] = pairs

    # Decisions about requests

    def refuse(self, request: Request, reason: WaitReason) -> None:
        """Record why a request does not run in this step."""
        self._refusals[request.request_id] = Refusal(request.request_id, reason)

    def accept(self, request: Request) -> None:
        """Drop the refusal of a request that runs in this step after all."""
        self._refusals.pop(request.request_id, None)

    def swap_in(self, request: Request) -> None:
        """Move a request from swapped to running; the caller has made sure it fits."""
        self._swap_ins += lifecycle.swap_in(self.state, request)
        self._swapped_in.append(request.request_id)
        self.accept(request)

    def preempt(self, request: Request, for_request: Request) -> None:
        """Preempt a running request to make room for `for_request`, which may be the request itself."""
        state = self.state
        mode = self._preemption_mode(request)
        self._swap_outs += lifecycle.preempt(state, request, mode, for_request)
        self._copies.pop(request, None)
        self.preempted.append(Preemption(request.request_id, for_request.request_id, mode))

    def _preemption_mode(self, request: Request) -> PreemptionMode:
        """Return the mode for a request.

        `auto` recomputes a request with one seat and swaps one with more. A request that cannot be swapped out is
        recomputed.
        """
        wanted = self.state.config.preemption_mode
        if wanted == "recompute" or (wanted == "auto" and request.num_seats == 1):
            return PreemptionMode.RECOMPUTE
        if self._swap_ins or not self.state.kv.can_swap_out(request):
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def give_up(self, request: Request) -> None:
        """End a request that cannot continue even alone, with an error and its output so far."""
        pool = self.state.kv.pool
        lifecycle.end_request(
            self.state,
            request,
            FinishReason.ERROR,
            error=f"its {len(request.live_sequences)} sequences need more than the {pool.num_blocks} blocks of the "
            f"KV cache; raise num_kv_blocks or kv_cache_memory, or lower n",
        )
        self._ignored.append(request.request_id)

    # The end

    def plan(self) -> StepPlan:
        """Return the plan of the step; ends the draft."""
        state, batch, kv, parts = self.state, self.state.batch, self.state.kv, self.parts
        rows = self.decode_rows
        num_decodes = len(rows)
        candidates = None
        if parts or len(self._beams):
            rows = np.concatenate([rows_of(part.seq for part in parts), self.decode_rows, self._beams])
        starts = batch.num_computed_tokens.take(rows)
        counts = samples = ones(len(rows))
        if parts:
            counts, samples = counts.copy(), samples.copy()
            counts[: len(parts)] = [part.count for part in parts]
            samples[: len(parts)] = [part.num_samples for part in parts]
        drafts = NO_NUMBERS
        if self._num_drafts:
            counts = counts.copy()
            counts[len(parts) : len(parts) + num_decodes] += [
                self._num_drafts.get(row, 0) for row in self.decode_rows.tolist()
            ]
            drafts = np.concatenate([batch.drafts[row][:count] for row, count in self._num_drafts.items()])
        if batch.has_beams:
            samples, candidates = samples.copy(), np.zeros(len(rows), dtype=np.int32)
            samples[len(parts) + num_decodes :] = 0
            candidates[: len(parts)] = [part.num_candidates for part in parts]
            candidates[len(parts) + num_decodes :] = [
                self._num_candidates(batch.sequences[row]) for row in self._beams
            ]
        new_rows, freed_rows = batch.take_changes() if batch.has_changes else ((), ())
        new_blocks = NO_NEW_BLOCKS
        if new_rows or kv.has_changes:
            new_blocks = NewBlocks(*kv.take_changes([new.row for new in new_rows]))
        moves = NO_MOVES
        if self._swap_outs or self._swap_ins or self._copies:
            copies = [pair for pairs in self._copies.values() for pair in pairs]
            moves = BlockMoves(tuple(self._swap_outs), tuple(self._swap_ins), tuple(copies))
        return StepPlan(
            step=state.step,
            rows=rows,
            starts=starts,
            counts=counts,
            samples=samples,
            num_prefills=len(parts),
            num_decodes=num_decodes,
            candidates=candidates,
            drafts=drafts,
            new_rows=new_rows,
            freed_rows=freed_rows,
            new_blocks=new_blocks,
            moves=moves,
        )

    def report(self, plan: StepPlan) -> StepReport:
        """Return the report that accompanies `plan`."""
        self._explain_first_waiting()
        state = self.state
        return StepReport(
            plan=plan,
            time=state.clock.now(),
            preempted=tuple(self.preempted),
            swapped_in=tuple(self._swapped_in),
            ignored=tuple(self._ignored),
            refusals=tuple(self._refusals.values()),
            num_waiting=len(state.waiting),
            num_running=len(state.batch),
            num_used_blocks=state.kv.pool.num_blocks - state.kv.num_available_blocks,
        )

    @staticmethod
    def _num_candidates(seq: Sequence) -> int:
        return num_candidates(seq.request.sampling_params, len(seq.request.stop_token_ids))

    def _explain_first_waiting(self) -> None:
        for queue in (self.state.swapped, self.state.waiting):
            first = queue.first()
            if first is not None and first.request_id not in self._refusals:
                reason = WaitReason.PREEMPTION_IN_STEP if self.preempted else WaitReason.DECODE_STEP
                self.refuse(first, reason)
