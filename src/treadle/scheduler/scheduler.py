"""The scheduler: three verbs (add, schedule, update) over two queues.

::

    add → waiting ──admissions──▶ running ──update──▶ finished
             ▲                       │
             └──────── preempt ──────┘

It knows requests, rows and block ids. It knows no tensors, no text and no threads.
"""

import operator

import numpy as np

from treadle.clock import Clock, SystemClock
from treadle.config import CacheConfig, SchedulerConfig
from treadle.errors import ConfigError, EngineError, InvalidRequestError
from treadle.kvcache import KVCacheManager
from treadle.request import FinishReason, IntArray, Request, RequestStatus, Sequence
from treadle.scheduler.batch import RunningBatch
from treadle.scheduler.phases import Phases, SchedulerState
from treadle.scheduler.plan import SequenceResult, StepOutputs, StepPlan, StepResult
from treadle.scheduler.policies import make_phase_policy
from treadle.scheduler.queue import RankedQueue


class Scheduler:
    """Decides what each step runs, and takes the step's result back into the requests.

    Args:
        config: limits and policy. `max_model_len` must fit the pool: one sequence can always run alone.
        cache_config: shape of the KV cache.
        clock: where times come from.
    """

    def __init__(
        self, config: SchedulerConfig, cache_config: CacheConfig, clock: Clock | None = None
    ) -> None:
        if config.max_model_len > cache_config.num_slots:
            raise ConfigError(
                "max_model_len",
                f"must be at most the {cache_config.num_slots} tokens that the KV pool holds "
                f"({cache_config.num_blocks} blocks of {cache_config.block_size}); "
                f"got {config.max_model_len}",
            )
        self.config = config
        self.kv = KVCacheManager(
            num_blocks=cache_config.num_blocks,
            block_size=cache_config.block_size,
            max_rows=config.max_num_seqs,
            max_model_len=config.max_model_len,
            enable_prefix_caching=cache_config.enable_prefix_caching,
        )
        self.batch = RunningBatch(config.max_num_seqs, config.max_model_len)
        self.waiting = RankedQueue()
        self._clock = clock or SystemClock()
        self._policy = make_phase_policy(config)
        self._state = SchedulerState(config, self._clock, self.kv, self.batch, self.waiting)
        self._requests: dict[str, Request] = {}
        self._finished: list[Request] = []
        self._aborts_after_step: list[str] = []
        self._plan: StepPlan | None = None
        self._num_added = 0
        self._num_steps = 0
        self._num_empty_steps = 0

    # Questions

    @property
    def num_unfinished_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    @property
    def has_undelivered_requests(self) -> bool:
        """Whether requests have ended that `take_finished` has not handed out."""
        return bool(self._finished)

    def unfinished_requests(self) -> list[Request]:
        """Every request that is waiting or running, in order of arrival."""
        return list(self._requests.values())

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that name."""
        return self._requests.get(request_id)

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError if `request` could not be added."""
        if request.request_id in self._requests:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already in use")
        (seq,) = request.sequences
        if not 0 < seq.num_tokens < self.config.max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"must have 1 to {self.config.max_model_len - 1} tokens (max_model_len less one), "
                f"got {seq.num_tokens}",
            )

    # Commands

    def add(self, request: Request) -> None:
        """Queue `request`; InvalidRequestError if it can never run."""
        self.check(request)
        request.arrival_number = self._num_added
        request.rank = (request.arrival_number,)
        if request.seed is None:
            request.seed = derive_seed(self.config.seed, request.arrival_number)
        self._num_added += 1
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> None:
        """End a request early; while a step executes this takes effect after it. Unknown ids are ignored."""
        if self._plan is not None:
            self._aborts_after_step.append(request_id)
        else:
            self.finish(request_id, FinishReason.ABORT)

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a request between steps and free its blocks. Unknown or finished ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason, error)

    def take_finished(self) -> list[Request]:
        """Hand out the requests that have ended since the last call, each once."""
        finished, self._finished = self._finished, []
        return finished

    def schedule(self) -> StepPlan:
        """Plan the next step. The result must come back through `update` or `fail` before the next call."""
        if self._plan is not None:
            raise EngineError("schedule() was called again before update() or fail()")
        phases = Phases(self._state)
        self._policy.run(phases)
        self._num_steps += 1
        plan = phases.plan(self._num_steps)
        self._watch_progress(plan)
        self._plan = plan
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take a step's result into the requests: append tokens, see who has ended, free what they held."""
        self._close(plan)
        batch = self.batch
        outputs_of_prompts: list[tuple[Request, int, SequenceResult]] = []
        first_rows: list[int] = []
        first_tokens: list[int] = []
        for scheduled, answer in zip(plan.sequences, result.sequences, strict=True):
            seq: Sequence = batch.sequences[scheduled.row]
            computed = scheduled.start + scheduled.count
            seq.set_num_computed_tokens(computed)
            self.kv.index_computed(seq, computed)
            if answer.prompt_logprobs:
                outputs_of_prompts.append((seq.request, scheduled.start + 1, answer))
            if scheduled.num_samples:
                batch.finish_prefill(scheduled.row)
                first_rows.append(scheduled.row)
                first_tokens.append(answer.token_ids[0])
        batch.num_computed_tokens[plan.decode_rows] += 1
        rows, token_ids = plan.decode_rows, result.decode_token_ids
        if first_rows:
            rows = np.concatenate([np.array(first_rows, dtype=np.int32), rows])
            token_ids = np.concatenate([np.array(first_tokens, dtype=np.int32), token_ids])
        outputs = StepOutputs(
            sequences=batch.sequences[rows],
            token_ids=token_ids,
            logprobs={batch.sequences[row]: value for row, value in result.logprobs.items()},
            prompt_logprobs=[(r, start, a.prompt_logprobs) for r, start, a in outputs_of_prompts],
        )
        if len(rows):
            self._append(rows, token_ids, num_first=len(first_rows))
        self._apply_aborts()
        return outputs

    def fail(self, plan: StepPlan, error: str) -> None:
        """The step could not be run: end its requests with an error and free their blocks."""
        self._close(plan)
        rows = [s.row for s in plan.sequences] + plan.decode_rows.tolist()
        for seq in [self.batch.sequences[row] for row in rows]:
            if not seq.is_finished:
                self._finish(seq.request, FinishReason.ERROR, error=error)
        self._apply_aborts()

    # Inside

    def _append(self, rows: IntArray, token_ids: IntArray, num_first: int) -> None:
        batch = self.batch
        now = self._clock.now()
        for seq in batch.sequences[rows[:num_first]]:
            if seq.request.metrics.first_token_time is None:
                seq.request.metrics.first_token_time = now
        ended = batch.append_tokens(rows, token_ids)
        for i in np.flatnonzero(ended).tolist():
            seq = batch.sequences[rows[i]]
            token_id = int(token_ids[i])
            seq.request.metrics.last_token_time = now
            if token_id in seq.request.stop_token_ids:
                named = seq.request.sampling_params.stop_token_ids or ()
                self._finish(seq.request, FinishReason.STOP, token_id if token_id in named else None)
            else:
                self._finish(seq.request, FinishReason.LENGTH)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        for seq in request.sequences:
            if seq.row is not None:
                self.kv.free(seq)
                self.batch.remove(seq)
            seq.finish_reason = reason
            seq.stop_reason = stop_reason
        request.status = RequestStatus.FINISHED
        request.error = error
        request.metrics.finished_time = self._clock.now()
        del self._requests[request.request_id]
        self._finished.append(request)

    def _close(self, plan: StepPlan) -> None:
        if plan is not self._plan:
            raise EngineError(f"step {plan.step} is not the one being executed")
        self._plan = None

    def _apply_aborts(self) -> None:
        aborts, self._aborts_after_step = self._aborts_after_step, []
        for request_id in aborts:
            self.finish(request_id, FinishReason.ABORT)

    def _watch_progress(self, plan: StepPlan) -> None:
        """A step that runs nothing must have changed a queue, and the next one must run something."""
        if not plan.is_empty or not self._requests:
            self._num_empty_steps = 0
            return
        self._num_empty_steps += 1
        if self._num_empty_steps >= 2 or not plan.preempted:
            raise EngineError(
                f"the scheduler is stuck at step {plan.step}: {len(self.waiting)} requests wait, "
                f"{len(self.batch)} sequences run, {self.kv.num_available_blocks} blocks are available"
            )


def derive_seed(engine_seed: int, arrival_number: int) -> int:
    """A seed for a request without one: SplitMix64 over both numbers (Steele, Lea and Flood 2014)."""
    mask = 2**64 - 1
    z = (operator.index(engine_seed) + (arrival_number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
