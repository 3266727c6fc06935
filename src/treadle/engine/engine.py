"""The engine: a step is schedule → execute → update; its tokens then become answers."""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from treadle.core.clock import Clock
from treadle.core.errors import EngineError, InvalidRequestError
from treadle.core.forks import check_not_forked
from treadle.core.outputs import RequestOutput
from treadle.core.request import FinishReason, Request
from treadle.core.request import Sequence as TokenSequence
from treadle.engine.observers import Observer
from treadle.engine.runner import Runner, check_result
from treadle.scheduler import (
    Scheduler,
    SchedulerSnapshot,
    SchedulerStats,
    StepOutputs,
    StepPlan,
    StepReport,
    StepResult,
    check_invariants,
)

logger = logging.getLogger("treadle")


class OutputProcessor(Protocol):
    """Turns tokens into answers."""

    def add(self, request: Request, *, stream: bool) -> None:
        """Start processing `request`."""
        ...

    def process(self, outputs: StepOutputs) -> list[tuple[TokenSequence, str]]:
        """Process a step's tokens; returns (sequence, stop string) for sequences that have reached one."""
        ...

    def take_failed(self) -> dict[Request, str]:
        """Unfinished requests whose tokens could not be processed since the last call, and why."""
        ...

    def collect(self, finished: Iterable[Request]) -> list[RequestOutput]:
        """The outputs that are due now, including those of `finished` requests."""
        ...


class Engine:
    """Runs requests to completion, one step at a time.

    Args:
        scheduler: decides what a step runs.
        runner: executes it; public, so that it can be measured and observed.
        output_processor: turns tokens into answers.
        clock: the scheduler's clock.
        observers: see every step.
        check_invariants: check the scheduler's state in every step and fail if it is wrong.

    A step that the runner cannot execute ends the requests in it, a request whose output cannot be processed ends
    alone, and an observer that raises is removed. A failure in the scheduling itself leaves queues and blocks in an
    unknown state: the engine has failed, and every further call raises EngineError.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        clock: Clock,
        observers: Iterable[Observer] = (),
        check_invariants: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.runner = runner
        self._output_processor = output_processor
        self._observers = list(observers)
        self._check_invariants = check_invariants
        self.num_steps = 0
        self._undelivered: list[RequestOutput] = []
        self._error: EngineError | None = None

    @property
    def error(self) -> EngineError | None:
        """The error with which the engine has failed; None while it works."""
        return self._error

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has work to do or outputs to deliver; False once the engine has failed."""
        if self._error is not None:
            return False
        scheduler = self.scheduler
        return bool(scheduler.num_unfinished_requests or scheduler.has_undelivered_requests or self._undelivered)

    def stats(self) -> SchedulerStats:
        """Lengths of the queues and use of the KV cache now. Safe to call from any thread."""
        return self.scheduler.stats()

    def snapshot(self) -> SchedulerSnapshot:
        """Queues and blocks now; to be called between two steps."""
        return self.scheduler.snapshot()

    def add_observer(self, observer: Observer) -> None:
        """Notify `observer` of every following step."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop notifying `observer`."""
        self._observers = [other for other in self._observers if other is not observer]

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        """Queue `request`; InvalidRequestError if it cannot be served, Overloaded if the queue is full, EngineError
        if the engine has failed, and in a process forked from the engine's.

        Args:
            request: a checked request with a new id.
            stream: produce an output with the new part after every token instead of one at the end.
        """
        self._check_supported(request, stream)
        self.scheduler.add(request)
        self._output_processor.add(request, stream=stream)

    def check(self, request: Request, *, stream: bool = False) -> None:
        """Raise what `add_request` would raise."""
        self._check_supported(request, stream)
        self.scheduler.check(request)

    def _check_supported(self, request: Request, stream: bool) -> None:
        check_not_forked()
        self._check_works()
        if request.lora is not None and not self.runner.supports_lora:
            raise InvalidRequestError(
                "lora_request",
                f"adapter {request.lora.lora_name!r}: this runner cannot compute LoRA adapters yet",
            )
        if stream and request.sampling_params.use_beam_search:
            raise InvalidRequestError(
                "use_beam_search", "cannot be streamed, because the best beam is only known at the end"
            )

    def abort_request(self, request_id: str) -> None:
        """End a request early; the next step returns its last output. Unknown ids are ignored."""
        if self._error is None:
            self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that became due. EngineError if the engine has failed."""
        self._check_works()
        report: StepReport | None = None
        outputs: StepOutputs | None = None
        interrupt: BaseException | None = None
        try:
            self.scheduler.wants_details = self._want_details()
            if self.scheduler.num_unfinished_requests:
                plan = self.scheduler.schedule()
                report = self.scheduler.report
                if self._check_invariants:
                    check_invariants(self.scheduler, plan)
                result, interrupt = self._execute(plan)
                if result is not None:
                    outputs = self._update(plan, result)
                self.num_steps += 1
            finished = self.scheduler.take_finished()
            # Kept until they are returned, so that an interrupt within an observer loses none.
            self._undelivered += self._output_processor.collect(finished)
            self._end_failed()
        except BaseException as error:
            self._error = EngineError(f"the engine has failed in step {self.scheduler.num_steps}: {error!r}")
            if isinstance(error, Exception):
                raise self._error from error
            raise
        if report is not None or finished:
            self._show(report, outputs, finished)
        if interrupt is not None:
            raise interrupt
        results, self._undelivered = self._undelivered, []
        return results

    def _check_works(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error

    def _want_details(self) -> bool:
        """Whether an observer wants details; one that raises is removed."""
        wanted = False
        for observer in tuple(self._observers):
            try:
                wanted |= bool(getattr(observer, "wants_details", False))
            except Exception:
                self._remove_failed(observer)
        return wanted

    def _show(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Notify the observers; one that raises is removed."""
        for observer in tuple(self._observers):
            try:
                observer.on_step(report, outputs, finished)
            except Exception:
                self._remove_failed(observer)

    def _remove_failed(self, observer: Observer) -> None:
        logger.exception("the observer %r failed and is removed", observer)
        self.remove_observer(observer)

    def _execute(self, plan: StepPlan) -> tuple[StepResult | None, BaseException | None]:
        """Execute a step; returns its result, or None if it failed, and what interrupted it, if anything did."""
        try:
            result = self.runner.execute(plan)
            check_result(plan, result)
            return result, None
        except Exception as error:
            # The step's requests end here; the others are not affected.
            logger.exception("step %d failed; its requests end with an error", plan.step)
            self.scheduler.fail(plan, f"EngineError: step {plan.step} failed: {error!r}")
            return None, None
        except BaseException as error:
            # Ctrl-C within a step: how much it computed is unknown, so its requests cannot continue.
            self.scheduler.fail(plan, f"EngineError: step {plan.step} was interrupted")
            return None, error

    def _update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take a step's result into the requests and their outputs."""
        outputs = self.scheduler.update(plan, result)
        for seq, stop_string in self._output_processor.process(outputs):
            self.scheduler.finish_sequence(seq, FinishReason.STOP, stop_string)
        self._end_failed()
        if self._check_invariants:
            check_invariants(self.scheduler)
        return outputs

    def _end_failed(self) -> None:
        """End the requests whose tokens could not be processed."""
        for request, error in self._output_processor.take_failed().items():
            self.scheduler.finish(request.request_id, FinishReason.ERROR, error)
