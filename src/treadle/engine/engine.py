"""The engine: a step is schedule → execute → update; its tokens then become answers."""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from treadle.core.clock import Clock
from treadle.core.errors import InvalidRequestError
from treadle.core.forks import check_not_forked
from treadle.core.outputs import RequestOutput
from treadle.core.request import FinishReason, Request
from treadle.core.request import Sequence as TokenSequence
from treadle.engine.observers import Observer
from treadle.engine.runner import Runner
from treadle.scheduler import (
    Scheduler,
    SchedulerSnapshot,
    SchedulerStats,
    StepOutputs,
    StepPlan,
    StepReport,
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
        check_invariants: check the scheduler's state in every step and raise AssertionError if it is wrong.
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

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has work to do or outputs to deliver."""
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
        in a process forked from the engine's.

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
        self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that became due."""
        scheduler = self.scheduler
        report: StepReport | None = None
        outputs: StepOutputs | None = None
        if scheduler.num_unfinished_requests:
            scheduler.wants_details = any(getattr(observer, "wants_details", False) for observer in self._observers)
            plan = scheduler.schedule()
            report = scheduler.report
            if self._check_invariants:
                check_invariants(scheduler, plan)
            outputs = self._run(plan)
            self.num_steps += 1
        finished = scheduler.take_finished()
        # Kept until they are returned, so that an interrupt within an observer loses none.
        self._undelivered += self._output_processor.collect(finished)
        if report is not None or finished:
            self._show(report, outputs, finished)
        results, self._undelivered = self._undelivered, []
        return results

    def _show(self, report: StepReport | None, outputs: StepOutputs | None, finished: Sequence[Request]) -> None:
        """Notify the observers; one that raises is removed."""
        for observer in tuple(self._observers):
            try:
                observer.on_step(report, outputs, finished)
            except Exception:
                logger.exception("the observer %r failed and is removed", observer)
                self.remove_observer(observer)

    def _run(self, plan: StepPlan) -> StepOutputs | None:
        """Execute a step; returns what it changed, or None if it failed."""
        try:
            result = self.runner.execute(plan)
        except Exception as error:
            # The step's requests end here; the others are not affected.
            logger.exception("step %d failed; its requests end with an error", plan.step)
            self.scheduler.fail(plan, f"EngineError: step {plan.step} failed: {error!r}")
            return None
        except BaseException:
            # Ctrl-C within a step: how much it computed is unknown, so its requests cannot continue.
            self.scheduler.fail(plan, f"EngineError: step {plan.step} was interrupted")
            raise
        outputs = self.scheduler.update(plan, result)
        for seq, stop_string in self._output_processor.process(outputs):
            self.scheduler.finish_sequence(seq, FinishReason.STOP, stop_string)
        if self._check_invariants:
            check_invariants(self.scheduler)
        return outputs
