"""The decode phase: schedules one token for each running sequence and allocates the blocks for it."""

import numpy as np

from treadle.core.request import IntArray, Request, Sequence
from treadle.scheduler import eviction
from treadle.scheduler.batch import rows_of
from treadle.scheduler.state import SchedulerState
from treadle.scheduler.step_draft import StepDraft


class Decodes:
    """Adds decodes to a step.

    Args:
        state: queues, rows and blocks.
        draft: the step being built.
    """

    def __init__(self, state: SchedulerState, draft: StepDraft) -> None:
        self._state = state
        self._draft = draft

    def run(self) -> None:
        """Schedule a decode for every sequence that has computed its known tokens.

        When blocks run out, requests get them in rank order, and the last requests in rank are preempted.
        """
        batch, kv = self._state.batch, self._state.kv
        rows = batch.decoding_rows()
        if not self._draft.is_empty:
            rows = self._without_planned(rows)
        if len(rows) > self._draft.remaining_tokens:
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
                # Preempted requests hold no blocks and drop out of the step. The other rows are unchanged.
                rows = rows[kv.num_blocks[rows] > 0]
        self._draft.add_decodes(rows)

    def _without_planned(self, rows: IntArray) -> IntArray:
        """Return those of `rows` that belong to requests with nothing in the step yet."""
        batch = self._state.batch
        rows = rows[~self._draft.rows_in_step()[rows]]
        if batch.num_groups:
            planned = {part.seq.request for part in self._draft.parts}
            rows = rows[[seq.request not in planned for seq in batch.sequences[rows]]]
        return rows

    def _within_budget(self, rows: IntArray) -> IntArray:
        """Return as many of `rows`, from the first, as the token budget allows; all beams of a search or none."""
        batch = self._state.batch
        fits = max(0, self._draft.remaining_tokens)
        next_request = batch.sequences[rows[fits]].request
        while fits and next_request.sampling_params.use_beam_search:
            if batch.sequences[rows[fits - 1]].request is not next_request:
                break
            fits -= 1
        return rows[:fits]

    def _grow_in_rank_order(self, rows: IntArray, needy: IntArray, missing: IntArray) -> None:
        """Allocate the missing blocks in rank order, and preempt requests when blocks run out.

        Consecutive requests with one sequence each get their blocks in one slice; each request with several
        sequences is handled by itself.

        Args:
            rows: int32 [n], all decoding rows, in rank order.
            needy: int32 [m], the rows that lack blocks or whose last block is shared, in rank order.
            missing: int32 [m], number of blocks that each of `needy` lacks.
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
                    self._draft.grow(request, sequences)
                is_other = [seq is None or seq.request is not request for seq in batch.sequences[needy]]
                is_left = np.array(is_other, dtype=np.bool_)
                needy, missing = self._with_blocks(needy[is_left], missing[is_left])
        self._grow_slice(needy, missing)

    def _grow_slice(self, needy: IntArray, missing: IntArray) -> None:
        """Allocate blocks to requests with one sequence each, in one slice; preempt as many requests as it takes."""
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
        """Drop the rows of requests that were preempted or given up; these hold no blocks."""
        is_left = self._state.kv.num_blocks[needy] > 0
        return needy[is_left], missing[is_left]

    def _num_blocks_needed(self, sequences: list[Sequence]) -> int:
        kv, batch = self._state.kv, self._state.batch
        rows = rows_of(sequences)
        missing = kv.missing_blocks(rows, batch.num_tokens[rows]).sum()
        return int(missing) + kv.num_copies_needed(rows, batch.num_computed_tokens[rows])

    def _make_room_for(self, request: Request, num_blocks: int) -> bool:
        """Make `num_blocks` available for `request` by preemption; return False if `request` itself had to go.

        Victims are strictly behind `request` in rank and not in the step yet. If preempting all of them would not
        free enough blocks, `request` is preempted instead, or given up if it is the only running request.
        """
        state = self._state
        num_missing = num_blocks - state.kv.num_available_blocks
        if num_missing <= 0:
            return True
        is_planned = None if self._draft.is_empty else self._draft.rows_in_step()
        victims = eviction.victims_to_grow(state, request, num_missing, is_planned)
        for victim in victims:
            self._draft.preempt(victim, for_request=request)
        if victims:
            return True
        if len(state.batch) == len(request.live_sequences):
            self._draft.give_up(request)  # too large even alone: another attempt would end the same way
        else:
            self._draft.preempt(request, for_request=request)
        return False
