"""The engine for an asyncio program: steps run in a thread, and outputs arrive as streams.

The thread owns the engine: adding, aborting and reading its state are commands that run between two steps. The event
loop only waits for outputs. The kernels release the GIL while they compute, so the loop keeps running
(docs/decisions/015-a-thread-for-the-engine.md).
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from treadle.core.errors import EngineError
from treadle.core.forks import check_not_forked
from treadle.core.outputs import RequestOutput, merge_deltas
from treadle.core.request import Request
from treadle.engine.engine import Engine

logger = logging.getLogger("treadle")

T = TypeVar("T")

LAGGING = 8
"""Maximum number of outputs pending for a slow reader before they are merged."""

MAX_STEP_S = 10.0
"""Time that the last step has to end at shutdown."""


class _Command:
    """A function to run between two steps, and the future of its result."""

    def __init__(self, function: Callable[[], Any], future: "Future[Any]") -> None:
        self._function = function
        self._future = future

    def run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._function())
        except Exception as error:
            self._future.set_exception(error)

    def fail(self, error: Exception) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


class RequestStream:
    """The outputs of one request, as they are produced.

    Ending the iteration early aborts the request.
    """

    def __init__(self, engine: "AsyncEngine", request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._pending: deque[RequestOutput] = deque()
        self._wake = asyncio.Event()
        self._error: EngineError | None = None
        self._is_finished = False

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                while self._pending:
                    # A slow reader gets the rest in one piece, which keeps the backlog small.
                    if len(self._pending) > LAGGING:
                        outputs = list(self._pending)
                        self._pending.clear()
                        output = merge_deltas(outputs)
                    else:
                        output = self._pending.popleft()
                    yield output
                if self._error is not None:
                    raise self._error
                if self._is_finished:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            if not self._is_finished:
                self._engine.abort(self)

    async def last(self) -> RequestOutput:
        """The last output, which is the whole answer if the request does not stream."""
        outputs = [output async for output in self]
        return outputs[-1]

    def put(self, output: RequestOutput) -> None:
        """Add an output (on the event loop)."""
        self._pending.append(output)
        self._is_finished = output.finished
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        """End with an error (on the event loop)."""
        self._error = error
        self._is_finished = True
        self._wake.set()


class AsyncEngine:
    """Runs an engine's steps in a thread of its own.

    Args:
        engine: must not be used by anything else while this runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._condition = threading.Condition()
        self._commands: list[_Command] = []
        self._is_stopping = False
        self._error: EngineError | None = None
        self._streams: dict[str, RequestStream] = {}  # changed in the engine's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="treadle-engine", daemon=True)

    @property
    def error(self) -> EngineError | None:
        """The error that stopped the engine; None while it works."""
        return self._error

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose output is still awaited."""
        return len(self._streams)

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def add(self, requests: Sequence[Request], *, stream: bool) -> list[RequestStream]:
        """Queue all requests, or none and raise.

        Args:
            requests: their ids must differ from those of all unfinished requests.
            stream: produce an output with the new part after every token instead of one at the end.

        Raises:
            InvalidRequestError: one cannot be served.
            Overloaded: the queue is full.
            EngineError: the engine has failed or is stopping.
        """
        outputs = [RequestStream(self, request.request_id) for request in requests]
        try:
            await self.call(lambda: self._add(requests, outputs, stream))
        except asyncio.CancelledError:
            for output in outputs:
                self.abort(output)
            raise
        return outputs

    def _add(self, requests: Sequence[Request], outputs: list[RequestStream], stream: bool) -> None:
        added: list[Request] = []
        try:
            for request in requests:
                self._engine.add_request(request, stream=stream)
                added.append(request)
        except Exception:
            for request in added:
                self._engine.abort_request(request.request_id)
            raise
        for output in outputs:
            self._streams[output.request_id] = output

    def abort(self, stream: RequestStream) -> None:
        """End a stream's request early, before the next step; nothing happens if it has ended or was refused.

        It takes a stream, not a name: another request may have the name by now.
        """
        self._submit(_Command(lambda: self._abort(stream), Future()))

    def _abort(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort_request(stream.request_id)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` between two steps, in the engine's thread; returns its result or raises its error."""
        check_not_forked()
        future: Future[T] = Future()
        if not self._submit(_Command(function, future)):
            raise self._error or EngineError("the engine has stopped")
        return await asyncio.wrap_future(future)

    async def shut_down(self) -> None:
        """End unfinished requests with an error, and stop the thread after its step."""
        for stream in list(self._streams.values()):
            stream.fail(EngineError("the server is shutting down"))
            self.abort(stream)
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        deadline = asyncio.get_running_loop().time() + MAX_STEP_S
        while self._thread.is_alive():  # polled: a thread that waits for it would hold up the end of the program
            if asyncio.get_running_loop().time() > deadline:
                logger.warning("the engine's last step has not ended after %g s; it is left behind", MAX_STEP_S)
                break
            await asyncio.sleep(0.005)

    def _submit(self, command: "_Command") -> bool:
        with self._condition:
            if self._is_stopping or self._error is not None:
                return False
            self._commands.append(command)
            self._condition.notify()
            return True

    def _run(self) -> None:
        engine = self._engine
        try:
            while True:
                with self._condition:
                    while not (self._commands or self._is_stopping or engine.has_unfinished_requests):
                        self._condition.wait()
                    if self._is_stopping and not self._commands:
                        return
                    commands, self._commands = self._commands, []
                for command in commands:
                    command.run()
                if engine.has_unfinished_requests:
                    outputs = self._with_streams(engine.step())
                    if outputs:
                        self._on_loop(self._deliver, outputs)
        except BaseException as error:
            logger.exception("the engine's thread died")
            with self._condition:
                self._error = error if isinstance(error, EngineError) else EngineError(f"the engine died: {error!r}")
                commands, self._commands = self._commands, []
            for stream in self._streams.values():
                self._on_loop(stream.fail, self._error)
            self._streams.clear()
            # Otherwise the callers of pending commands would wait forever.
            for command in commands:
                command.fail(self._error)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop has closed")

    @staticmethod
    def _deliver(outputs: list[tuple[RequestStream, RequestOutput]]) -> None:
        for stream, output in outputs:
            stream.put(output)

    def _with_streams(self, outputs: list[RequestOutput]) -> list[tuple[RequestStream, RequestOutput]]:
        """Each output with its stream; outputs without a stream are dropped."""
        found = []
        for output in outputs:
            streams = self._streams
            stream = streams.pop(output.request_id, None) if output.finished else streams.get(output.request_id)
            if stream is not None:
                found.append((stream, output))
        return found
