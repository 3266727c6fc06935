"""The phases of a step. A phase policy decides which phases a step runs and in which order.

A request never loses blocks to a request behind it in rank, except to a request of better priority
(`displacement`). Decodes are in decodes.py and prompts in prompts.py; this module admits and swaps in requests.
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
"""How many long prompts the admissions of a step pass over; bounds the cost of a queue full of them."""


class Phases:
    """The phases. Each one schedules as much as the remaining token budget allows and adds it to the draft.

    Attributes:
        draft: the step being built.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.draft = StepDraft(state)
        self._prompts = Prompts(state, self.draft)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens left in the budget of the step."""
        return self.draft.remaining_tokens

    @property
    def is_empty(self) -> bool:
        """Whether the step runs nothing so far."""
        return self.draft.is_empty

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that are ready to decode."""
        batch = self._state.batch
        return len(batch.decoding_rows()) if batch.has_beams else len(batch) - batch.num_prefilling

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests; swapped requests are not included."""
        return len(self._state.waiting)

    @property
    def num_swapped(self) -> int:
        """Number of requests whose blocks are in the host tier."""
        return len(self._state.swapped)

    def displacement(self) -> None:
        """Preempt the worst running requests for the first waiting one, if the order of the queue displaces.

        Preempts as few requests as possible, and none unless the waiting one can then start. Requests of equal
        priority never displace each other. Runs before the decodes, so that no victim is in the step yet.
        """
        request = self._state.waiting.first()
        if request is None or not self._state.policies.displaces:
            return
        if not self._prompts.waits_for_long_prompt(request):
            for victim in eviction.victims_to_admit(self._state, request):
                self.draft.preempt(victim, for_request=request)

    def decodes(self) -> None:
        """Schedule a decode for every sequence that has computed its known tokens."""
        Decodes(self._state, self.draft).run()

    def chunks(self, cut: Cut = Cut.ANY) -> None:
        """Continue the sequences whose known tokens are partly computed."""
        self._prompts.chunks(cut)

    def use_up_budget(self) -> None:
        """Give the rest of the budget to the prompts that were held back for others."""
        self._prompts.use_up_budget()

    # Swapped

    def swapped(self) -> None:
        """Swap requests in, in rank order, up to the first one that does not fit.

        A request is not swapped in before a waiting request of better rank: it would take the room that the waiting
        request needs, and would be preempted for that request again.
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
        """Swap in `request` and schedule its decode or the rest of its prompt, or return why it has to wait."""
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
        """Whether a waiting request that needs blocks or seats precedes the swapped `request` in rank."""
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
        """Admit waiting requests, in rank order, up to the first one that cannot start.

        Partly computed prompts behind a waiting request are continued here, in rank order with the admissions. A
        second long prompt is passed over; it starts after the requests behind it if any budget is left.
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
        """Admit `request` or record why it waits; return False if the requests behind it have to wait for it."""
        reason = self._admit(request, cut)
        if reason is None:
            self.draft.accept(request)
            return True
        self.draft.refuse(request, reason)
        return reason is WaitReason.TOO_MANY_ADAPTERS and not request.is_aged

    def _admit(self, request: Request, cut: Cut) -> WaitReason | None:
        """Admit `request` and schedule its first tokens, or return why it has to wait."""
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
        """Whether every preemption of this step was a displacement for `request`."""
        preempted = self.draft.preempted
        return self._state.policies.displaces and all(p.for_request_id == request.request_id for p in preempted)
