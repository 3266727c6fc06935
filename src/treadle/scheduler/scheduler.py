"""The scheduler: the verbs add, schedule and update over the queues waiting, running and swapped.

The scheduler handles requests, rows and block ids, and no tensors, text or threads. The transitions between queues
are in lifecycle.py, the phases of a step in phases.py, the choice of phases in policies/, and the handling of results
in results.py.
"""

import operator
from dataclasses import replace

from treadle.core.clock import Clock, SystemClock
from treadle.core.config import CacheConfig, SchedulerConfig, check_prompt_length
from treadle.core.errors import ConfigError, EngineError, InvalidRequestError, Overloaded
from treadle.core.request import FinishReason, Request, Sequence
from treadle.kvcache import KVCacheManager
from treadle.scheduler import lifecycle
from treadle.scheduler.ageing import Ageing
from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.phases import Phases
from treadle.scheduler.plan import StepPlan, StepResult
from treadle.scheduler.policies.active import ActivePolicies, GuardedStep
from treadle.scheduler.policies.base import Moment
from treadle.scheduler.policies.registry import needs_whole_prompts
from treadle.scheduler.queue import RankedQueue
from treadle.scheduler.report import (
    PreemptionMode,
    SchedulerSnapshot,
    SchedulerStats,
    StepOutputs,
    StepReport,
    block_holders,
    count_blocks,
    describe_step,
)
from treadle.scheduler.results import take_result
from treadle.scheduler.state import SchedulerState


class Scheduler:
    """Decides what each step runs, and applies the step's result to the requests.

    Args:
        config: limits and policies. `max_model_len` must fit the pool, so that one sequence can always run alone.
        cache_config: shape of the KV cache.
        clock: source of all times, in seconds; the system clock if None.

    Attributes:
        config, cache_config: as given.
        report: the report of the latest step; None before the first step.
        wants_details: whether reports include details.

    Raises:
        ConfigError: a limit does not fit the pool or the policy, or a policy is unknown or invalid.
    """

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig, clock: Clock | None = None) -> None:
        if config.max_model_len > cache_config.num_slots:
            raise ConfigError(
                "max_model_len",
                f"must be at most the {cache_config.num_slots} tokens that the KV pool holds "
                f"({cache_config.num_blocks} blocks of {cache_config.block_size} tokens), got {config.max_model_len}",
            )
        if needs_whole_prompts(config.scheduler) and config.max_num_batched_tokens < config.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_model_len ({config.max_model_len}) with scheduler {config.scheduler!r}, which "
                f"computes prompts whole, got {config.max_num_batched_tokens}",
            )
        self.config = config
        self.cache_config = cache_config
        self._clock = clock or SystemClock()
        kv = KVCacheManager(
            num_blocks=cache_config.num_blocks,
            num_host_blocks=cache_config.num_host_blocks,
            block_size=cache_config.block_size,
            max_rows=config.max_num_seqs,
            max_tokens=config.max_model_len,
            enable_prefix_caching=cache_config.enable_prefix_caching,
        )
        self._state = SchedulerState(
            config=config,
            clock=self._clock,
            kv=kv,
            batch=RunningBatch(config.max_num_seqs, config.max_model_len),
            policies=ActivePolicies(config, kv),
        )
        self.report: StepReport | None = None
        self.wants_details = False
        self._arrived: list[Request] = []
        self._aborts_after_step: list[str] = []
        self._plan: StepPlan | None = None
        self._num_added = 0
        self._num_empty_steps = 0
        self._ageing = Ageing(config.age_limit_s)

    # Questions

    @property
    def kv(self) -> KVCacheManager:
        """The KV cache manager, which owns the block tables."""
        return self._state.kv

    @property
    def batch(self) -> RunningBatch:
        """The running sequences."""
        return self._state.batch

    @property
    def waiting(self) -> RankedQueue:
        """Requests that hold no blocks, in rank order."""
        return self._state.waiting

    @property
    def swapped(self) -> RankedQueue:
        """Requests whose blocks are in the host tier, in rank order."""
        return self._state.swapped

    @property
    def num_steps(self) -> int:
        """Number of steps planned so far, which is the number of the latest step."""
        return self._state.step

    @property
    def num_unfinished_requests(self) -> int:
        """Number of waiting, running and swapped requests."""
        return len(self._state.requests)

    @property
    def has_undelivered_requests(self) -> bool:
        """Whether requests have ended that `take_finished` has not returned yet."""
        return bool(self._state.finished)

    def stats(self) -> SchedulerStats:
        """Return queue lengths and KV cache usage now. Cheap, and safe to call from any thread."""
        state, kv = self._state, self._state.kv
        num_waiting, num_swapped = len(state.waiting), len(state.swapped)
        return SchedulerStats(
            num_waiting_requests=num_waiting,
            num_running_requests=len(state.requests) - num_waiting - num_swapped,
            num_swapped_requests=num_swapped,
            num_running_sequences=len(state.batch),
            kv_cache_usage=kv.usage,
            num_blocks=count_blocks(state),
            num_prefix_queries=kv.num_prefix_queries,
            num_prefix_hits=kv.num_prefix_hits,
        )

    def snapshot(self) -> SchedulerSnapshot:
        """Return the queues and blocks now. Call it between two steps."""
        state = self._state
        return SchedulerSnapshot(
            time=self._clock.now(),
            step=state.step,
            waiting=tuple(state.waiting),
            running=tuple(state.batch.running_requests()),
            swapped=tuple(state.swapped),
            num_blocks=count_blocks(state),
            holders=block_holders(state),
            config=self.config,
            cache_config=self.cache_config,
        )

    def unfinished_requests(self) -> list[Request]:
        """Return all waiting, running and swapped requests, in order of arrival."""
        return list(self._state.requests.values())

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id; None if there is none."""
        return self._state.requests.get(request_id)

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError if `request` can never run, Overloaded if the queue is full."""
        config, waiting = self.config, self._state.waiting
        if request.request_id in self._state.requests or request.request_id in self._state.finished:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already in use")
        num_tokens = len(request.prompt_token_ids)
        check_prompt_length(num_tokens, config.max_model_len)
        if request.sampling_params.n > config.max_num_seqs:
            raise InvalidRequestError(
                "n", f"must be at most max_num_seqs ({config.max_num_seqs}), got {request.sampling_params.n}"
            )
        if request.lora is not None and config.max_loras < 1:
            raise InvalidRequestError(
                "lora_request", f"adapter {request.lora.lora_name!r}: adapters are disabled (max_loras is 0)"
            )
        for limit, queued, new, noun in (
            (config.max_num_queued_requests, len(waiting), 1, "requests"),
            (config.max_num_queued_tokens, waiting.num_prompt_tokens, num_tokens, "prompt tokens"),
        ):
            if limit is not None and queued + new > limit:
                raise Overloaded(
                    f"the queue is full: {queued} {noun} are waiting and the limit is {limit}; try again later",
                    len(waiting),
                    waiting.num_prompt_tokens,
                )

    # Commands

    def add(self, request: Request) -> None:
        """Queue `request`. Raises InvalidRequestError if it can never run, Overloaded if the queue is full."""
        self.check(request)
        request.arrival_number = self._num_added
        request.rank = (1, self._state.policies.key(request), request.arrival_number)
        if request.seed is None:
            request.seed = derive_seed(self.config.seed, request.arrival_number)
        self._num_added += 1
        self._state.requests[request.request_id] = request
        self._state.waiting.add(request)
        self._state.policies.added(request)
        self._ageing.watch(request)
        self._arrived.append(request)

    def abort(self, request_id: str) -> None:
        """End a request early; takes effect after the step that is executing. Unknown ids are ignored."""
        if self._plan is not None:
            self._aborts_after_step.append(request_id)
        else:
            self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request between steps and free its blocks. Ids of unknown or finished requests are ignored."""
        request = self._state.requests.get(request_id)
        if request is not None:
            lifecycle.end_request(self._state, request, reason, error=error)

    def finish_sequence(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End one sequence of a request between steps. A finished sequence is ignored."""
        if not seq.is_finished:
            lifecycle.end_sequence(self._state, seq, reason, stop_reason)

    def take_finished(self) -> list[Request]:
        """Return the requests that have ended since the last call, each exactly once."""
        finished, self._state.finished = self._state.finished, {}
        return list(finished.values())

    def schedule(self) -> StepPlan:
        """Plan the next step. Call `update` or `fail` with the plan before the next call."""
        if self._plan is not None:
            raise EngineError("schedule() was called again before update() or fail()")
        state = self._state
        state.step += 1
        state.num_cached_tokens = 0
        self._ageing.apply(state)
        self._renew_ranks()
        before = self._queue_lengths()
        phases = Phases(state)
        phases.displacement()
        self._run_phases(phases, before)
        plan = phases.draft.plan()
        report = phases.draft.report(plan)
        if self.wants_details:
            report = replace(report, details=describe_step(state, plan, self._arrived))
        self._arrived.clear()
        self._watch_progress(plan, has_changed=self._queue_lengths() != before)
        for preemption in report.preempted:
            request = state.requests.get(preemption.request_id)
            if request is not None:  # else it ended in the same step
                self._ageing.watch(request)
        self._plan, self.report = plan, report
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Apply a step's result to the requests: append tokens, end finished sequences and free their blocks."""
        self._close(plan)
        if self._state.policies.observes_tokens:
            self._report_tokens(plan, result)
        outputs = take_result(self._state, plan, result)
        self._apply_aborts()
        return outputs

    def fail(self, plan: StepPlan, error: str) -> None:
        """End the requests of a step that could not be executed, with an error, and free their blocks.

        Requests that the step was to swap in or out are recomputed instead.
        """
        self._close(plan)
        assert self.report is not None
        batch = self._state.batch
        swapped_out = {p.request_id for p in self.report.preempted if p.mode is PreemptionMode.SWAP}
        for request_id in sorted(swapped_out | set(self.report.swapped_in)):
            request = self._state.requests.get(request_id)
            if request is not None:
                lifecycle.recompute_lost(self._state, request)
        for seq in batch.sequences[plan.rows]:
            if seq is not None and not seq.is_finished:
                lifecycle.end_request(self._state, seq.request, FinishReason.ERROR, error=error)
        batch.resend_all_rows()
        self._apply_aborts()

    # Inside

    def _report_tokens(self, plan: StepPlan, result: StepResult) -> None:
        """Report to the policies how many tokens the step has computed and generated for each request."""
        sequences = self._state.batch.sequences
        num_tokens: dict[Request, tuple[int, int]] = {}

        def count(row: int, num_computed: int, num_generated: int) -> None:
            request: Request = sequences[row].request
            before = num_tokens.get(request, (0, 0))
            num_tokens[request] = (before[0] + num_computed, before[1] + num_generated)

        num_generated = plan.samples.copy()
        if plan.candidates is not None:
            num_generated += plan.candidates > 0
        num_computed = plan.counts
        if result.num_accepted is not None:
            num_computed = num_computed.copy()
            decodes = slice(plan.num_prefills, plan.num_prefills + plan.num_decodes)
            num_generated[decodes] = num_computed[decodes] = result.num_accepted
        for entry in zip(plan.rows.tolist(), num_computed.tolist(), num_generated.tolist(), strict=True):
            count(*entry)
        for request, tokens in num_tokens.items():
            self._state.policies.tokens(request, *tokens)

    def _renew_ranks(self) -> None:
        """Compute the ranks again if the order reports its keys stale, or if the order was replaced."""
        state, policies = self._state, self._state.policies
        if policies.changes_while_waiting:
            num_waiting = len(state.waiting) + len(state.swapped)
            moment = Moment(state.clock.now(), num_waiting, len(state.batch), state.kv.version)
            if policies.are_ranks_stale(moment):
                for queue in (state.waiting, state.swapped):
                    keys = {request: policies.key(request) for request in queue if not request.is_aged}
                    queue.change_ranks({r: (1, key, r.arrival_number) for r, key in keys.items()})
        if policies.ranks_are_void:
            policies.ranks_are_void = False
            for request in self.unfinished_requests():
                lifecycle.change_rank(state, request, (1, policies.key(request), request.arrival_number))

    def _run_phases(self, phases: Phases, before: tuple[int, int, int]) -> None:
        """Let the phase policy plan the step; replace the policy if the step would make no progress."""
        policies = self._state.policies
        policies.run(GuardedStep(phases))
        phases.use_up_budget()
        is_stuck = phases.is_empty and self._state.requests and self._queue_lengths() == before
        if is_stuck and policies.run_default(GuardedStep(phases)):
            phases.use_up_budget()

    def _close(self, plan: StepPlan) -> None:
        if plan is not self._plan:
            raise EngineError(f"step {plan.step} is not the one being executed")
        self._plan = None

    def _apply_aborts(self) -> None:
        aborts, self._aborts_after_step = self._aborts_after_step, []
        for request_id in aborts:
            self.finish(request_id, FinishReason.ABORT)

    def _queue_lengths(self) -> tuple[int, int, int]:
        return len(self.waiting), len(self.swapped), len(self.batch)

    def _watch_progress(self, plan: StepPlan, has_changed: bool) -> None:
        """Raise EngineError if the scheduler is stuck.

        A step that runs nothing must change a queue, and the step after it must run something.
        """
        if not plan.is_empty or not self._state.requests:
            self._num_empty_steps = 0
            return
        self._num_empty_steps += 1
        if self._num_empty_steps >= 2 or not has_changed:
            raise EngineError(
                f"the scheduler is stuck at step {plan.step}: {len(self.waiting)} requests are waiting, "
                f"{len(self.swapped)} are swapped, {len(self.batch)} sequences are running, "
                f"{self.kv.num_available_blocks} blocks are available"
            )


def derive_seed(engine_seed: int, arrival_number: int) -> int:
    """Return the seed of a request without one: SplitMix64 of both numbers (Steele, Lea and Flood 2014)."""
    mask = 2**64 - 1
    z = (operator.index(engine_seed) + (arrival_number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
