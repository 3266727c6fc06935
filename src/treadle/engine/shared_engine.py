"""One engine for several callers, in one thread or in many: each gets the outputs of its own requests.

The engine has no thread. A caller that needs an output runs the next step, which computes the requests of all
callers, and puts each output into the mailbox of its call.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from treadle.core.errors import EngineError
from treadle.core.forks import check_not_forked
from treadle.core.outputs import RequestOutput
from treadle.core.request import Request
from treadle.engine.engine import Engine

Mailbox = list[RequestOutput]


class SharedEngine:
    """Runs an engine for calls that overlap.

    Args:
        engine: only calls may step it while there are any.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = _FairLock()
        self._mailboxes: dict[str, Mailbox] = {}  # of unfinished requests; changed under the lock
        self._left: deque[tuple[Sequence[Request], Mailbox]] = deque()

    def check(self, request: Request, *, stream: bool) -> None:
        """Raise the error that queuing `request` would raise: InvalidRequestError or Overloaded."""
        with self._turn():
            self._engine.check(request, stream=stream)

    @contextmanager
    def call(self, requests: Sequence[Request], *, stream: bool) -> Iterator[Callable[[], list[RequestOutput]]]:
        """Queue all requests or none; those unfinished when the block ends are aborted.

        Yields a function that returns their new outputs. If none are pending it runs one step, which may produce
        none.

        Raises:
            InvalidRequestError, Overloaded: as `Engine.add_request`.
            EngineError: the engine has failed; or called within a step of the same engine, by an observer, or in a
                process forked from the engine's.
        """
        mailbox: Mailbox = []
        try:
            with self._turn():
                for request in requests:
                    self._engine.add_request(request, stream=stream)
                    self._mailboxes[request.request_id] = mailbox
            yield lambda: self._take(mailbox)
        finally:
            self._left.append((requests, mailbox))
            self._abort_left()

    def _take(self, mailbox: Mailbox) -> list[RequestOutput]:
        if not mailbox:
            with self._turn():
                if not mailbox:  # another thread's step has brought none
                    if self._engine.error is None and not self._engine.has_unfinished_requests:
                        raise EngineError("the outputs of this call were lost in a step that failed")
                    self._step()
        taken = mailbox[:]
        del mailbox[: len(taken)]  # another thread may have appended to it
        return taken

    def _step(self) -> None:
        for output in self._engine.step():
            of = self._mailboxes
            mailbox = of.pop(output.request_id, None) if output.finished else of.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        check_not_forked()  # before the lock, which another thread may have held at the fork
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()
            self._abort_left()

    def _abort_left(self) -> None:
        """Abort the requests of calls that have ended, now or when another thread releases the lock.

        It never blocks, because the garbage collector may close a dropped stream anywhere, even within a step.
        """
        engine = self._engine
        while self._left and self._lock.acquire(wait=False):
            try:
                while self._left:
                    requests, mailbox = self._left.popleft()
                    for request in requests:
                        if self._mailboxes.get(request.request_id) is mailbox:
                            del self._mailboxes[request.request_id]
                            engine.abort_request(request.request_id)
                if engine.has_unfinished_requests and not engine.scheduler.num_unfinished_requests:
                    self._step()  # delivers what was aborted
            finally:
                self._lock.release()


class _FairLock:
    """A lock that threads acquire in the order in which they asked.

    `threading.Lock` may repeatedly go to the thread that has just released it
    (docs/decisions/022-calls-that-overlap.md has figures).
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # held briefly, to change the two fields below
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def acquire(self, *, wait: bool = True) -> bool:
        """Take the lock, without `wait` only if it is free. Returns whether it was taken."""
        me = threading.get_ident()
        if not self._mutex.acquire(blocking=wait):
            return False  # its holder is about to take or release this lock
        try:
            if self._owner is None:
                self._owner = me
                return True
            if not wait:
                return False
            if self._owner == me:
                raise EngineError(
                    "a step of this engine is running in this thread; an observer cannot run another step"
                )
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        finally:
            self._mutex.release()
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self._mutex:
                was_waiting = (me, turn) in self._waiting
                if was_waiting:
                    self._waiting.remove((me, turn))
            if not was_waiting:  # the lock was handed over in the meantime
                self.release()
            raise
        return True

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest, if any."""
        with self._mutex:
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                turn.release()
