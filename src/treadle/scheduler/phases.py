"""The phases of a step. A phase policy says which of them run, in which order.

Every request runs at its rank: a request never loses blocks to one behind it, except to one of better
priority (`displacement`).
"""

from dataclasses import dataclass

import numpy as np

from treadle.core.request import FinishReason, IntArray, Request, Sequence
from treadle.kvcache import AllocStatus, BlockPairs
from treadle.scheduler import eviction, guards, lifecycle
from treadle.scheduler.batch import BoolArray, rows_of
from treadle.scheduler.beams import num_candidates
from treadle.scheduler.plan import NO_MOVES, NO_NEW_BLOCKS, NO_NUMBERS, BlockMoves, NewBlocks, StepPlan, ones
from treadle.scheduler.policies.base import Cut
from treadle.scheduler.report import Preemption, PreemptionMode, Refusal, StepReport, WaitReason
from treadle.scheduler.state import BlockRefusal, SchedulerState

MAX_PASSED_OVER = 32
"""Long prompts that an admission looks beyond, so that a queue of them costs nothing in every step."""


@dataclass(frozen=True, slots=True)
class Part:
    """Known tokens of a sequence that the step computes: a prompt, or a part of one.

    Attributes:
        seq: whose.
        start, count: position of the first token, and how many.
        num_samples: tokens to sample after the last one: 0 while more is to be computed, several at a fork.
        num_candidates: most likely next tokens to report (beam search).
    """

    seq: Sequence
    start: int
    count: int
    num_samples: int
    num_candidates: int


class Phases:
    """One step in the making. Each phase takes what it can get of the budget that is left.

    Attributes:
        remaining_tokens: what is left of the token budget.
        parts: prompts and parts of prompts in the step so far.
        decode_rows: plain decodes in the step so far.
        preempted: who lost its blocks in this step.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.remaining_tokens = state.config.max_num_batched_tokens
        self.parts: list[Part] = []
        self.decode_rows: IntArray = NO_NUMBERS
        self.preempted: list[Preemption] = []
        self._num_drafts: dict[int, int] = {}  # of the decode rows that have any, in their order
        self._beams: IntArray = NO_NUMBERS
        self._swapped_in: list[str] = []
        self._ignored: list[str] = []
        self._refusals: dict[str, Refusal] = {}  # of each request the last one
        self._swap_outs: BlockPairs = []
        self._swap_ins: BlockPairs = []
        self._copies: dict[Request, BlockPairs] = {}
        # Of the prompts: those behind a waiting request, with their cut; long ones that may take more in the end.
        self._behind_waiting: list[tuple[Sequence, Cut]] = []
        self._held_back: list[Sequence] = []
        self._prompt_budget: int | None = None  # what the first prompt of the step found
        self._has_long = False
        self._is_last_round = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the step so far."""
        return not self.parts and not len(self.decode_rows) and not len(self._beams)

    @property
    def num_decoding(self) -> int:
        """Running sequences that could decode."""
        batch = self._state.batch
        return len(batch.decoding_rows()) if batch.has_beams else len(batch) - batch.num_prefilling

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._state.waiting)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in the host tier."""
        return len(self._state.swapped)

    def plan(self) -> StepPlan:
        """Close the step."""
        state, batch, kv, parts = self._state, self._state.batch, self._state.kv, self.parts
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
        new_rows, freed_rows = batch.take_news() if batch.has_news else ((), ())
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
        """What became of whom in planning the step."""
        self._explain_first_waiting()
        state = self._state
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
        for queue in (self._state.swapped, self._state.waiting):
            first = queue.first()
            if first is not None and first.request_id not in self._refusals:
                reason = WaitReason.PREEMPTION if self.preempted else WaitReason.DECODE_STEP
                self._refuse(first, reason)

    def _refuse(self, request: Request, reason: WaitReason) -> None:
        self._refusals[request.request_id] = Refusal(request.request_id, reason)

    # Displacement

    def displacement(self) -> None:
        """Under an order that displaces: preempt the worst running requests for a better one that waits.

        Only if that lets it start, and only as many as it takes. Equal priorities never displace each other. Runs
        before the decodes, so that nothing planned is undone.
        """
        request = self._state.waiting.first()
        if self._state.policies.displaces and request is not None and not self._waits_for_long_prompt(request):
            for victim in eviction.victims_to_admit(self._state, request):
                self._preempt(victim, for_request=request)

    # Decodes

    def decodes(self) -> None:
        """Every sequence whose known tokens are computed decodes.

        Where blocks run out, requests get theirs in rank order, by preempting the last in rank.
        """
        batch, kv = self._state.batch, self._state.kv
        rows = batch.decoding_rows()
        if not self.is_empty:
            rows = self._without_planned(rows)
        if len(rows) > self.remaining_tokens:
            rows = self._within_budget(rows)
        needed = batch.num_tokens.take(rows)
        growing = needed > kv.num_tokens_covered.take(rows)
        shared = rows[:0]
        if batch.num_groups:
            shared = kv.rows_with_shared_tail(rows, batch.num_computed_tokens[rows])
            if len(shared):
                growing |= np.isin(rows, shared)
        needy = rows[growing]
        if len(needy):
            missing = kv.missing_blocks(needy, needed[growing])
            if not len(shared) and missing.sum() <= kv.num_available_blocks:
                kv.append(needy, missing)
            else:
                self._grow_in_rank_order(rows, needy, missing)
                # What was preempted holds no blocks, and decodes no more. Nobody else's state has changed.
                rows = rows[kv.num_blocks[rows] > 0]
        self._add_decodes(rows)

    def _rows_in_step(self) -> BoolArray:
        """Which rows are in the step: bool [rows]."""
        is_in_step: BoolArray = np.zeros(self._state.config.max_num_seqs, dtype=np.bool_)
        is_in_step[self.decode_rows] = True
        is_in_step[self._beams] = True
        for part in self.parts:
            is_in_step[part.seq.row] = True
        return is_in_step

    def _without_planned(self, rows: IntArray) -> IntArray:
        """Those of `rows` whose requests have nothing in the step yet."""
        batch = self._state.batch
        rows = rows[~self._rows_in_step()[rows]]
        if batch.num_groups:
            planned = {part.seq.request for part in self.parts}
            rows = rows[[seq.request not in planned for seq in batch.sequences[rows]]]
        return rows

    def _within_budget(self, rows: IntArray) -> IntArray:
        """The first of `rows` for which there are tokens; all beams of a search or none."""
        batch = self._state.batch
        fits = max(0, self.remaining_tokens)
        next_request = batch.sequences[rows[fits]].request
        while fits and next_request.sampling_params.use_beam_search:
            if batch.sequences[rows[fits - 1]].request is not next_request:
                break
            fits -= 1
        return rows[:fits]

    def _grow_in_rank_order(self, rows: IntArray, needy: IntArray, missing: IntArray) -> None:
        """Give `missing` blocks to those of the decoding `rows` that need some, preempting where they run out.

        Requests with one sequence get theirs in one slice; those with several are looked at one by one.

        Args:
            rows: int32 [n], all that decode, in rank order.
            needy: int32 [m], those of them that lack blocks or see a shared tail.
            missing: int32 [m], blocks that each of `needy` lacks.
        """
        batch, kv = self._state.batch, self._state.kv
        while batch.num_groups and len(needy):
            is_group = batch.is_group[needy]
            end = int(is_group.argmax()) if is_group.any() else len(needy)
            self._grow_slice(needy[:end], missing[:end])
            needy, missing = self._with_blocks(needy[end:], missing[end:])
            if len(needy):
                request: Request = batch.sequences[needy[0]].request
                sequences = [seq for seq in batch.sequences[rows[kv.num_blocks[rows] > 0]] if seq.request is request]
                if self._make_room_for(request, self._num_blocks_needed(sequences)):
                    self._grow(request, sequences)
                is_other = [seq is None or seq.request is not request for seq in batch.sequences[needy]]
                is_left = np.array(is_other, dtype=np.bool_)
                needy, missing = self._with_blocks(needy[is_left], missing[is_left])
        self._grow_slice(needy, missing)

    def _grow_slice(self, needy: IntArray, missing: IntArray) -> None:
        """Give blocks to requests with one sequence each, in one slice, after preempting as many as that takes."""
        batch, kv = self._state.batch, self._state.kv
        while len(needy):
            totals = missing.cumsum()
            num_fitting = int(totals.searchsorted(kv.num_available_blocks, side="right"))
            if num_fitting == len(needy):
                kv.append(needy, missing)
                return
            self._make_room_for(batch.sequences[needy[num_fitting]].request, int(totals[num_fitting]))
            needy, missing = self._with_blocks(needy, missing)

    def _with_blocks(self, needy: IntArray, missing: IntArray) -> tuple[IntArray, IntArray]:
        """Without those that have been preempted or given up: they hold no blocks."""
        is_left = self._state.kv.num_blocks[needy] > 0
        return needy[is_left], missing[is_left]

    def _num_blocks_needed(self, sequences: list[Sequence]) -> int:
        kv, batch = self._state.kv, self._state.batch
        rows = rows_of(sequences)
        missing = kv.missing_blocks(rows, batch.num_tokens[rows]).sum()
        return int(missing) + kv.num_copies_needed(rows, batch.num_computed_tokens[rows])

    def _make_room_for(self, request: Request, num_blocks: int) -> bool:
        """Preempt until `num_blocks` are there for `request`; False if it fell itself.

        Only those strictly behind fall, and nobody who is in the step already. If all of them would not do, `request`
        falls instead of them.
        """
        state = self._state
        num_missing = num_blocks - state.kv.num_available_blocks
        if num_missing <= 0:
            return True
        is_planned = None if self.is_empty else self._rows_in_step()
        victims = eviction.victims_to_grow(state, request, num_missing, is_planned)
        for victim in victims:
            self._preempt(victim, for_request=request)
        if victims:
            return True
        if len(state.batch) == len(request.live_sequences):
            self._give_up(request)  # alone, and still too large: coming back would not help
        else:
            self._preempt(request, for_request=request)
        return False

    def _grow(self, request: Request, sequences: list[Sequence]) -> None:
        """Take the blocks that sequences of one request need to decode; the caller has seen to it."""
        kv, batch = self._state.kv, self._state.batch
        rows = rows_of(sequences)
        missing = kv.missing_blocks(rows, batch.num_tokens[rows])
        if missing.any():
            kv.append(rows[missing > 0], missing[missing > 0])
        if request.sampling_params.n > 1:
            pairs = [pair for seq in sequences for pair in kv.copy_shared_tail(seq, seq.num_computed_tokens)]
            if pairs:
                self._copies[request] = pairs

    def _add_decodes(self, rows: IntArray) -> None:
        batch = self._state.batch
        self.remaining_tokens -= len(rows)
        if batch.has_beams:
            is_beam = batch.is_beam[rows]
            self._beams = np.concatenate([self._beams, rows[is_beam]])
            rows = rows[~is_beam]
        self.decode_rows = np.concatenate([self.decode_rows, rows]) if len(self.decode_rows) else rows
        if batch.drafts:
            self._take_drafts(rows)

    def _take_drafts(self, rows: IntArray) -> None:
        """Let decodes check the tokens that the runner proposes, as far as budget and free blocks go.

        A draft that finds no room is dropped: none preempts anybody, or ends a sequence early.
        """
        batch, kv, most = self._state.batch, self._state.kv, self._state.config.num_lookahead_slots
        for i, row in enumerate(rows.tolist()):
            draft = batch.drafts.get(row)
            if draft is None:
                continue
            num_tokens = int(batch.num_tokens[row])
            # The last token that a sequence may have needs no KV.
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

    # Preemption

    def _preempt(self, request: Request, for_request: Request) -> None:
        state = self._state
        mode = self._preemption_mode(request)
        self._swap_outs += lifecycle.preempt(state, request, mode, for_request)
        self._copies.pop(request, None)
        self.preempted.append(Preemption(request.request_id, for_request.request_id, mode))

    def _preemption_mode(self, request: Request) -> PreemptionMode:
        """One seat is computed again, several are swapped, unless the caller forces either or there is no room."""
        wanted = self._state.config.preemption_mode
        if wanted == "recompute" or (wanted == "auto" and request.num_seats == 1):
            return PreemptionMode.RECOMPUTE
        if self._swap_ins or not self._state.kv.can_swap_out(request):
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    # Chunks

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Sequences whose known tokens are partly computed go on with them. Their blocks are already theirs.

        Those behind a waiting request take their turn among the admissions. If there are none in this step, they get
        what is left of the budget.
        """
        first = self._state.waiting.first()
        self._behind_waiting = []
        in_step = {part.seq.row for part in self.parts}
        for seq in self._state.batch.prefilling_sequences():
            if seq.shares is not None or seq.row in in_step:
                continue
            if first is not None and first.rank < seq.request.rank:
                self._behind_waiting.append((seq, cut))
            elif not self._go_on(seq, cut):
                break

    def _go_on(self, seq: Sequence, cut: Cut) -> bool:
        """Compute more of a sequence; False if the budget does not allow it."""
        if seq.row is None:
            return True  # it has been preempted since
        if self._why_no_tokens(seq.num_tokens_to_prefill - seq.num_computed_tokens, cut) is not None:
            return False
        self._compute(seq, cut)
        return True

    def _compute_admitted(self, sequences: list[Sequence], cut: Cut) -> None:
        """Compute the known tokens of sequences that have just got their blocks, as far as the budget allows."""
        for seq in sequences:
            is_due = self._state.batch.is_prefilling[seq.row] and seq.shares is None
            if is_due and self.remaining_tokens > 0:
                self._compute(seq, cut)

    def _compute(self, seq: Sequence, cut: Cut) -> None:
        """Compute known tokens of a sequence; of a long prompt its share for now, and of a second long one none."""
        if self._prompt_budget is None:
            self._prompt_budget = self.remaining_tokens
        if self._is_last_round or not self._is_long(seq.num_tokens_to_prefill - seq.num_computed_tokens, cut):
            self._schedule_prompt(seq, self.remaining_tokens)
            return
        if seq not in self._held_back:
            self._held_back.append(seq)
        if not self._has_long:
            self._has_long = True
            share = min(self._state.config.long_prefill_tokens, -(-self._prompt_budget // 2))
            self._schedule_prompt(seq, min(share, self.remaining_tokens))

    def _is_long(self, num_tokens: int, cut: Cut) -> bool:
        """Whether a prompt with so many tokens left has to leave some of a step to others."""
        return cut is not Cut.NEVER and 0 < self._state.config.long_prefill_tokens < num_tokens

    def _would_be_second_long(self, request: Request, cut: Cut) -> bool:
        """Whether the step computes a long prompt and the one of `request`, which waits, is long too."""
        if not self._has_long or self._is_last_round:
            return False
        num_tokens = request.live_sequences[0].num_tokens_to_prefill
        if not self._is_long(num_tokens, cut):
            return False
        return self._is_long(num_tokens - self._state.kv.plan_allocation(request).num_cached_tokens, cut)

    def _waits_for_long_prompt(self, request: Request) -> bool:
        """Whether a long prompt before that of `request`, which waits and is long too, is being computed."""
        if not self._is_long(request.live_sequences[0].num_tokens_to_prefill, Cut.ANY):
            return False
        return any(
            seq.request.rank < request.rank
            and self._is_long(seq.num_tokens_to_prefill - seq.num_computed_tokens, Cut.ANY)
            for seq in self._state.batch.prefilling_sequences()
        )

    def use_up_budget(self) -> None:
        """Prompts that had to wait for others get their turn, and then long ones what is left, in rank order."""
        if not self._behind_waiting and not self._held_back:
            self._is_last_round = True
            return
        behind, self._behind_waiting = self._behind_waiting, []
        for seq, cut in behind:
            if not self._go_on(seq, cut):
                break
        self._is_last_round = True
        held_back, self._held_back = self._held_back, []
        for seq in sorted(held_back, key=lambda seq: (seq.request.rank, seq.index)):
            if self.remaining_tokens <= 0:
                break
            if seq.row is None:
                continue  # it has been preempted since
            place = next((i for i, part in enumerate(self.parts) if part.seq is seq), None)
            if place is not None:
                self.remaining_tokens += self.parts.pop(place).count
            self._schedule_prompt(seq, self.remaining_tokens)

    def _schedule_prompt(self, seq: Sequence, limit: int) -> None:
        """Compute the next of a sequence's known tokens, at most `limit`."""
        request = seq.request
        params = request.sampling_params
        assert seq.row is not None
        start = seq.num_computed_tokens
        count = min(seq.num_tokens_to_prefill - start, limit)
        is_last = start + count == seq.num_tokens
        samples = candidates = 0
        if is_last and params.use_beam_search:
            candidates = self._num_candidates(seq)
        elif is_last:
            samples = 1 if request.is_forked else params.n
        self.parts.append(Part(seq, start, count, samples, candidates))
        self.remaining_tokens -= count

    def _why_no_tokens(self, needed: int, cut: Cut) -> WaitReason | None:
        """Why none of `needed` prompt tokens can be computed in what is left of the step."""
        if self.remaining_tokens <= 0:
            return WaitReason.NO_BUDGET
        if needed > self.remaining_tokens and (cut is Cut.NEVER or (cut is Cut.ONLY_FIRST and not self.is_empty)):
            return WaitReason.NOT_WHOLE
        return None

    # Swapped

    def swapped(self) -> None:
        """Swapped requests come back, in rank order, until the first one for which there is no room.

        None comes back before a waiting one of better rank: it would take the room which that one waits for, and
        fall for it again.
        """
        if self.preempted:
            return
        request = self._state.swapped.first()
        while request is not None:
            following = self._state.swapped.after(request)
            reason = self._swap_in(request)
            if reason is not None:
                self._refuse(request, reason)
                if reason is not WaitReason.ADAPTER or request.is_aged:
                    return
            request = following

    def _swap_in(self, request: Request) -> WaitReason | None:
        """Move `request` from swapped to running and let it decode or go on with its prompt, or say why not."""
        state = self._state
        sequences = request.live_sequences
        if self._is_behind_waiting(request):
            return WaitReason.WAITING_FIRST
        if state.batch.num_free_seats < request.num_seats:
            return WaitReason.NO_SEAT
        if self.remaining_tokens < len(sequences):
            return WaitReason.NO_BUDGET
        if guards.lacks_adapter(state, request):
            return WaitReason.ADAPTER
        status = state.kv.can_swap_in(request, guards.headroom(state, request, len(state.batch)))
        if status is AllocStatus.NEVER:
            self._give_up(request)
            return None
        if status is AllocStatus.LATER:
            return WaitReason.NO_BLOCKS
        self._swap_ins += lifecycle.swap_in(state, request)
        self._refusals.pop(request.request_id, None)
        self._swapped_in.append(request.request_id)
        batch = state.batch
        ready = [seq for seq in sequences if not batch.is_prefilling[seq.row]]
        if ready and not (request.sampling_params.use_beam_search and len(ready) < len(sequences)):
            self._grow(request, ready)
            self._add_decodes(rows_of(ready))
        self._compute_admitted(sequences, Cut.ANY)
        return None

    def _is_behind_waiting(self, request: Request) -> bool:
        """Whether a waiting request that could use the blocks or seats precedes a swapped one in rank."""
        for number, waiting in enumerate(self._state.waiting):
            if waiting.rank > request.rank:
                return False
            is_passed_over = guards.lacks_adapter(self._state, waiting) or (
                number < MAX_PASSED_OVER and self._would_be_second_long(waiting, Cut.ANY)
            )
            if not is_passed_over:
                return True
        return False

    # Admissions

    def admissions(self, cut: Cut = Cut.ANY) -> None:
        """Waiting requests start, in rank order, until the first one that cannot.

        Partly computed prompts behind one of them take their turn here. A second long prompt is passed over, and
        starts after those behind it if anything is left of the budget.
        """
        state = self._state
        passed_over: list[Request] = []
        request = state.waiting.first()
        while request is not None:
            self._go_on_before(request)
            following = state.waiting.after(request)
            if self._would_be_second_long(request, cut):
                passed_over.append(request)
                if request.is_aged or len(passed_over) == MAX_PASSED_OVER:
                    break
            elif not self._admit_or_explain(request, cut):
                break
            request = following
        self.use_up_budget()
        for request in passed_over:
            if not self._admit_or_explain(request, cut):
                break

    def _go_on_before(self, request: Request) -> None:
        """Partly computed prompts that precede `request` in rank go on."""
        while self._behind_waiting and self._behind_waiting[0][0].request.rank < request.rank:
            self._go_on(*self._behind_waiting.pop(0))

    def _admit_or_explain(self, request: Request, cut: Cut) -> bool:
        """Admit `request`, or note why it waits; False if those behind it have to wait for it."""
        reason = self._admit(request, cut)
        if reason is None:
            self._refusals.pop(request.request_id, None)
            return True
        self._refuse(request, reason)
        return reason is WaitReason.ADAPTER and not request.is_aged

    def _admit(self, request: Request, cut: Cut) -> WaitReason | None:
        """Move `request` from waiting to running with its first tokens, or say why not now."""
        state = self._state
        if self.preempted and not self._has_displaced_only_for(request):
            return WaitReason.PREEMPTION
        if guards.is_behind_swapped(state, request):
            return WaitReason.SWAPPED_FIRST
        if guards.lacks_adapter(state, request):
            return WaitReason.ADAPTER
        if state.batch.num_free_seats < request.num_seats:
            return WaitReason.NO_SEAT
        if self.remaining_tokens <= 0:
            return WaitReason.NO_BUDGET
        if guards.is_still_refused(state, request):
            return WaitReason.NO_BLOCKS
        plan = state.kv.plan_allocation(request)
        status = state.kv.can_allocate(plan, guards.headroom(state, request, len(state.batch)))
        if status is AllocStatus.NEVER:
            self._give_up(request)
            return None
        if status is AllocStatus.LATER:
            state.block_refusal = BlockRefusal(
                request, state.kv.num_available_blocks, len(state.batch), state.kv.version
            )
            return WaitReason.NO_BLOCKS
        lead = plan.sequences[0].seq
        reason = self._why_no_tokens(lead.num_tokens_to_prefill - plan.num_cached_tokens, cut)
        if reason is not None:
            return reason
        lifecycle.admit(state, request, plan)
        self._compute_admitted([part.seq for part in plan.sequences], cut)
        return None

    def _has_displaced_only_for(self, request: Request) -> bool:
        """Whether all preemptions of this step made room for requests of better priority."""
        return self._state.policies.displaces and all(p.for_request_id == request.request_id for p in self.preempted)

    def _give_up(self, request: Request) -> None:
        """The request cannot go on even alone: it ends with an error and what it has so far."""
        pool = self._state.kv.pool
        lifecycle.end_request(
            self._state,
            request,
            FinishReason.ERROR,
            error=f"its {len(request.live_sequences)} sequences need more than the {pool.num_blocks} KV blocks "
            f"that there are; raise num_kv_blocks or kv_cache_memory, or lower n",
        )
        self._ignored.append(request.request_id)
