"""The engine: one step is schedule → execute → update, then tokens become answers."""

import logging
from collections.abc import Iterable
from typing import Protocol

from treadle.clock import Clock
from treadle.engine.observers import StepObserver
from treadle.engine.runner import Runner
from treadle.errors import InvalidRequestError
from treadle.outputs import RequestOutput
from treadle.request import FinishReason, Request, Sequence
from treadle.scheduler import Scheduler, StepOutputs, StepPlan, check_invariants

logger = logging.getLogger("treadle")


class OutputProcessor(Protocol):
    """Turns the tokens of steps into answers."""

    def add(self, request: Request, *, stream: bool) -> None:
        """Start to follow `request`."""
        ...

    def process(self, outputs: StepOutputs) -> list[tuple[Sequence, str]]:
        """Take a step's tokens; returns (sequence, stop string) for sequences that have met one."""
        ...

    def collect(self, finished: Iterable[Request]) -> list[RequestOutput]:
        """The outputs that are due now, those of `finished` requests among them."""
        ...


class Engine:
    """Runs requests to their end, one step at a time.

    Args:
        scheduler: decides what a step runs.
        runner: runs it.
        output_processor: turns tokens into answers.
        clock: of the scheduler.
        observers: see every step.
        check_invariants: check the scheduler's state in every step, and fail loudly if it is wrong.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        clock: Clock,
        observers: Iterable[StepObserver] = (),
        check_invariants: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._runner = runner
        self._output_processor = output_processor
        self._observers = list(observers)
        self._check_invariants = check_invariants
        self.num_steps = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to do or to deliver."""
        return self.scheduler.num_unfinished_requests > 0 or self.scheduler.has_undelivered_requests

    def add_observer(self, observer: StepObserver) -> None:
        """Show every further step to `observer`."""
        self._observers.append(observer)

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        """Queue `request`; InvalidRequestError if it cannot be served, Overloaded if the queue is full.

        Args:
            request: a checked request with a new id.
            stream: give an output of what is new after every token, rather than one at the end.
        """
        self._check_supported(request, stream)
        self.scheduler.add(request)
        self._output_processor.add(request, stream=stream)

    def check(self, request: Request, *, stream: bool = False) -> None:
        """Raise what `add_request` would raise."""
        self._check_supported(request, stream)
        self.scheduler.check(request)

    def _check_supported(self, request: Request, stream: bool) -> None:
        if request.lora is not None and not self._runner.supports_lora:
            raise InvalidRequestError(
                "lora_request",
                f"adapter {request.lora.lora_name!r}: this runner cannot compute LoRA adapters yet",
            )
        if stream and request.sampling_params.use_beam_search:
            raise InvalidRequestError("use_beam_search", "cannot be streamed: which beam wins is known at the end")

    def abort_request(self, request_id: str) -> None:
        """End a request early; its last output comes with the next step. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that it made due."""
        scheduler = self.scheduler
        plan = None
        if scheduler.num_unfinished_requests:
            plan = scheduler.schedule()
            if self._check_invariants:
                check_invariants(scheduler, plan)
            for observer in self._observers:
                observer.on_schedule(plan)
            self._run(plan)
            self.num_steps += 1
        finished = scheduler.take_finished()
        if plan is not None:
            for observer in self._observers:
                observer.on_update(plan, finished)
        return self._output_processor.collect(finished)

    def _run(self, plan: StepPlan) -> None:
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            # The step's requests end here; everybody else goes on.
            logger.exception("step %d failed; its requests end with an error", plan.step)
            self.scheduler.fail(plan, f"EngineError: step {plan.step} failed: {error!r}")
            return
        except BaseException:
            # Ctrl-C within a step: what it computed is unknown, so its requests cannot go on.
            self.scheduler.fail(plan, f"EngineError: step {plan.step} was interrupted")
            raise
        outputs = self.scheduler.update(plan, result)
        for seq, stop_string in self._output_processor.process(outputs):
            self.scheduler.finish_sequence(seq, FinishReason.STOP, stop_string)
        if self._check_invariants:
            check_invariants(self.scheduler)
