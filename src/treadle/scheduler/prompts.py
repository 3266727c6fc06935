"""Schedules the tokens of prompts, and limits how much of a step a long prompt takes.

The first long prompt of a step gets a share of the token budget. Further long prompts wait until the short ones have
had their turn. The rest of the budget goes to the long prompts in rank order.
"""

from treadle.core.request import Request, Sequence
from treadle.scheduler.policies.base import Cut
from treadle.scheduler.report import WaitReason
from treadle.scheduler.state import SchedulerState
from treadle.scheduler.step_draft import StepDraft


class Prompts:
    """Adds prompts and chunks of prompts to a step.

    Args:
        state: queues, rows and blocks.
        draft: the step being built.
    """

    def __init__(self, state: SchedulerState, draft: StepDraft) -> None:
        self._state = state
        self._draft = draft
        # Partly computed prompts behind a waiting request, with their cut; long prompts that may get more at the end.
        self._behind_waiting: list[tuple[Sequence, Cut]] = []
        self._held_back: list[Sequence] = []
        self._prompt_budget: int | None = None  # tokens left for the first prompt of the step
        self._has_long = False
        self._is_last_round = False

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Continue the sequences whose known tokens are partly computed. Their blocks are allocated already.

        The sequences behind a waiting request in rank have to wait for the admissions, or for the end of a step
        without admissions.
        """
        first = self._state.waiting.first()
        self._behind_waiting = []
        in_step = {part.seq.row for part in self._draft.parts}
        for seq in self._state.batch.prefilling_sequences():
            if seq.shares is not None or seq.row in in_step:
                continue
            if first is not None and first.rank < seq.request.rank:
                self._behind_waiting.append((seq, cut))
            elif not self._go_on(seq, cut):
                break

    def _go_on(self, seq: Sequence, cut: Cut) -> bool:
        """Compute more known tokens of a sequence; return False if the budget does not allow it."""
        if seq.row is None:
            return True  # preempted in the meantime
        if self.why_no_tokens(seq.num_tokens_to_prefill - seq.num_computed_tokens, cut) is not None:
            return False
        self._compute(seq, cut)
        return True

    def compute_admitted(self, sequences: list[Sequence], cut: Cut) -> None:
        """Compute known tokens of sequences that were just admitted or swapped in, as far as the budget allows."""
        for seq in sequences:
            is_due = self._state.batch.is_prefilling[seq.row] and seq.shares is None
            if is_due and self._draft.remaining_tokens > 0:
                self._compute(seq, cut)

    def _compute(self, seq: Sequence, cut: Cut) -> None:
        """Compute known tokens of a sequence: for the first long prompt its share, for further long ones none yet."""
        if self._prompt_budget is None:
            self._prompt_budget = self._draft.remaining_tokens
        if self._is_last_round or not self._is_long(seq.num_tokens_to_prefill - seq.num_computed_tokens, cut):
            is_whole = cut is Cut.NEVER or (cut is Cut.ONLY_FIRST and not self._draft.is_empty)
            self._draft.add_prompt(seq, self._draft.remaining_tokens, is_whole=is_whole)
            return
        if seq not in self._held_back:
            self._held_back.append(seq)
        if not self._has_long:
            self._has_long = True
            share = min(self._state.config.long_prefill_tokens, -(-self._prompt_budget // 2))
            self._draft.add_prompt(seq, min(share, self._draft.remaining_tokens))

    def _is_long(self, num_tokens: int, cut: Cut) -> bool:
        """Whether a prompt with `num_tokens` tokens left to compute is limited to a share of the step."""
        return cut is not Cut.NEVER and 0 < self._state.config.long_prefill_tokens < num_tokens

    def would_be_second_long(self, request: Request, cut: Cut) -> bool:
        """Whether the step computes a long prompt and the prompt of the waiting `request` is long too."""
        if not self._has_long or self._is_last_round:
            return False
        num_tokens = request.live_sequences[0].num_tokens_to_prefill
        if not self._is_long(num_tokens, cut):
            return False
        return self._is_long(num_tokens - self._state.kv.plan_allocation(request).num_cached_tokens, cut)

    def waits_for_long_prompt(self, request: Request) -> bool:
        """Whether `request` has a long prompt and another long prompt, ahead of it in rank, is partly computed."""
        if not self._is_long(request.live_sequences[0].num_tokens_to_prefill, Cut.ANY):
            return False
        return any(
            seq.request.rank < request.rank
            and self._is_long(seq.num_tokens_to_prefill - seq.num_computed_tokens, Cut.ANY)
            for seq in self._state.batch.prefilling_sequences()
        )

    def use_up_budget(self) -> None:
        """Continue the prompts behind waiting requests, then give the rest of the budget to the long prompts."""
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
            if self._draft.remaining_tokens <= 0:
                break
            if seq.row is None:
                continue  # preempted in the meantime
            self._draft.take_back(seq)
            self._draft.add_prompt(seq, self._draft.remaining_tokens)

    def why_no_tokens(self, needed: int, cut: Cut) -> WaitReason | None:
        """Return why a prompt with `needed` tokens left to compute cannot start in this step; None if it can."""
        draft = self._draft
        if draft.remaining_tokens <= 0:
            return WaitReason.NO_TOKEN_BUDGET
        must_be_whole = cut is Cut.NEVER or (cut is Cut.ONLY_FIRST and not draft.is_empty)
        return WaitReason.PROMPT_EXCEEDS_BUDGET if must_be_whole and needed > draft.remaining_tokens else None

    def go_on_before(self, request: Request) -> None:
        """Continue the partly computed prompts that precede `request` in rank."""
        while self._behind_waiting and self._behind_waiting[0][0].request.rank < request.rank:
            self._go_on(*self._behind_waiting.pop(0))
