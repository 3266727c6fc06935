"""The phases of a step. A phase policy says which of them run, in which order.

Every request runs at its rank: a request never loses blocks to one behind it, except to one of better
priority (`displacement`). Decodes are in decodes.py, prompts in prompts.py; here requests come in.
"""

from treadle.core.request import Request
from treadle.kvcache import AllocStatus
from treadle.scheduler import eviction, guards, lifecycle
from treadle.scheduler.batch import rows_of
from treadle.scheduler.decodes import Decodes
from treadle.scheduler.policies.base import Cut
from treadle.scheduler.prompts import Prompts
from treadle.scheduler.report import WaitReason
from treadle.scheduler.state import BlockRefusal, SchedulerState
from treadle.scheduler.step_draft import StepDraft

MAX_PASSED_OVER = 32
"""Long prompts that an admission looks beyond, so that a queue of them costs nothing in every step."""


class Phases:
    """Each phase takes what it can get of the token budget that is left, and adds it to the draft of the step.

    Attributes:
        draft: the step in the making.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.draft = StepDraft(state)
        self._prompts = Prompts(state, self.draft)

    @property
    def remaining_tokens(self) -> int:
        """What is left of the token budget."""
        return self.draft.remaining_tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in the step so far."""
        return self.draft.is_empty

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

    def displacement(self) -> None:
        """Under an order that displaces: preempt the worst running requests for a better one that waits.

        Only if that lets it start, and only as many as it takes. Equal priorities never displace each other. Runs
        before the decodes, so that nothing planned is undone.
        """
        request = self._state.waiting.first()
        if request is None or not self._state.policies.displaces:
            return
        if not self._prompts.waits_for_long_prompt(request):
            for victim in eviction.victims_to_admit(self._state, request):
                self.draft.preempt(victim, for_request=request)

    def decodes(self) -> None:
        """Every sequence whose known tokens are computed decodes."""
        Decodes(self._state, self.draft).run()

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Sequences whose known tokens are partly computed go on with them."""
        self._prompts.chunks(cut)

    def use_up_budget(self) -> None:
        """Prompts that had to wait for others get what is left of the budget."""
        self._prompts.use_up_budget()

    # Swapped

    def swapped(self) -> None:
        """Swapped requests come back, in rank order, until the first one for which there is no room.

        None comes back before a waiting one of better rank: it would take the room which that one waits for, and
        fall for it again.
        """
        if self.draft.preempted:
            return
        request = self._state.swapped.first()
        while request is not None:
            following = self._state.swapped.after(request)
            reason = self._swap_in(request)
            if reason is not None:
                self.draft.refuse(request, reason)
                if reason is not WaitReason.TOO_MANY_ADAPTERS or request.is_aged:
                    return
            request = following

    def _swap_in(self, request: Request) -> WaitReason | None:
        """Move `request` from swapped to running and let it decode or go on with its prompt, or say why not."""
        state = self._state
        sequences = request.live_sequences
        if self._is_behind_waiting(request):
            return WaitReason.BEHIND_WAITING_REQUEST
        if state.batch.num_free_seats < request.num_seats:
            return WaitReason.NO_FREE_SEATS
        if self.draft.remaining_tokens < len(sequences):
            return WaitReason.NO_TOKEN_BUDGET
        if guards.lacks_adapter(state, request):
            return WaitReason.TOO_MANY_ADAPTERS
        status = state.kv.can_swap_in(request, guards.headroom(state, request, len(state.batch)))
        if status is AllocStatus.NEVER:
            self.draft.give_up(request)
            return None
        if status is AllocStatus.LATER:
            return WaitReason.NO_FREE_BLOCKS
        self.draft.swap_in(request)
        batch = state.batch
        ready = [seq for seq in sequences if not batch.is_prefilling[seq.row]]
        if ready and not (request.sampling_params.use_beam_search and len(ready) < len(sequences)):
            self.draft.grow(request, ready)
            self.draft.add_decodes(rows_of(ready))
        self._prompts.compute_admitted(sequences, Cut.ANY)
        return None

    def _is_behind_waiting(self, request: Request) -> bool:
        """Whether a waiting request that could use the blocks or seats precedes a swapped one in rank."""
        for number, waiting in enumerate(self._state.waiting):
            if waiting.rank > request.rank:
                return False
            is_passed_over = guards.lacks_adapter(self._state, waiting) or (
                number < MAX_PASSED_OVER and self._prompts.would_be_second_long(waiting, Cut.ANY)
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
            self._prompts.go_on_before(request)
            following = state.waiting.after(request)
            if self._prompts.would_be_second_long(request, cut):
                passed_over.append(request)
                if request.is_aged or len(passed_over) == MAX_PASSED_OVER:
                    break
            elif not self._admit_or_explain(request, cut):
                break
            request = following
        self._prompts.use_up_budget()
        for request in passed_over:
            if not self._admit_or_explain(request, cut):
                break

    def _admit_or_explain(self, request: Request, cut: Cut) -> bool:
        """Admit `request`, or note why it waits; False if those behind it have to wait for it."""
        reason = self._admit(request, cut)
        if reason is None:
            self.draft.accept(request)
            return True
        self.draft.refuse(request, reason)
        return reason is WaitReason.TOO_MANY_ADAPTERS and not request.is_aged

    def _admit(self, request: Request, cut: Cut) -> WaitReason | None:
        """Move `request` from waiting to running with its first tokens, or say why not now."""
        state = self._state
        if self.draft.preempted and not self._has_displaced_only_for(request):
            return WaitReason.PREEMPTION_IN_STEP
        if guards.is_behind_swapped(state, request):
            return WaitReason.BEHIND_SWAPPED_REQUEST
        if guards.lacks_adapter(state, request):
            return WaitReason.TOO_MANY_ADAPTERS
        if state.batch.num_free_seats < request.num_seats:
            return WaitReason.NO_FREE_SEATS
        if self.draft.remaining_tokens <= 0:
            return WaitReason.NO_TOKEN_BUDGET
        if guards.is_still_refused(state, request):
            return WaitReason.NO_FREE_BLOCKS
        plan = state.kv.plan_allocation(request)
        status = state.kv.can_allocate(plan, guards.headroom(state, request, len(state.batch)))
        if status is AllocStatus.NEVER:
            self.draft.give_up(request)
            return None
        if status is AllocStatus.LATER:
            state.block_refusal = BlockRefusal(
                request, state.kv.num_available_blocks, len(state.batch), state.kv.version
            )
            return WaitReason.NO_FREE_BLOCKS
        lead = plan.sequences[0].seq
        reason = self._prompts.why_no_tokens(lead.num_tokens_to_prefill - plan.num_cached_tokens, cut)
        if reason is not None:
            return reason
        lifecycle.admit(state, request, plan)
        self._prompts.compute_admitted([part.seq for part in plan.sequences], cut)
        return None

    def _has_displaced_only_for(self, request: Request) -> bool:
        """Whether all preemptions of this step made room for requests of better priority."""
        preempted = self.draft.preempted
        return self._state.policies.displaces and all(p.for_request_id == request.request_id for p in preempted)
