"""A process for work on what cannot be trusted: work that crashes or stalls there harms only its own request.

The parent writes a line of JSON for each piece of work and reads one. The process starts with the first piece,
ends with the parent (end of file), and is replaced after a crash, a timeout, or work that leaves too much memory in
use. It gets neither the parent's threads nor its environment. Each piece has limits of CPU time, time, memory and
stack.
"""

import contextlib
import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from treadle.core.errors import EngineError, cut

MAX_START_S = 60.0
READ_BYTES = 2**18
MAX_ERROR_CHARS = 300
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "TZ")


@dataclass(frozen=True)
class Limits:
    """Limits of one piece of work.

    Attributes:
        cpu_s: whole seconds of CPU time.
        wall_s: seconds.
        num_bytes: address space beyond what the process has when the piece begins. A process that has grown by as
            much since it started is replaced.
        stack_bytes: stack of the thread that works.
    """

    cpu_s: int
    wall_s: float
    num_bytes: int
    stack_bytes: int


class WorkFailed(Exception):  # noqa: N818 - what failed is the caller's to say
    """The work raised an exception; the text is the exception's."""


class LimitExceeded(Exception):  # noqa: N818
    """The work crashed or took too much; the text is a predicate, such as "takes more than 2 s of CPU time"."""


class LimitedProcess:
    """The parent's end. Not thread-safe.

    Args:
        script: the file that the process runs; it calls `serve`.
        limits: the same that the script gives to `serve`.
    """

    def __init__(self, script: Path, limits: Limits) -> None:
        self._script = script
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._idle_bytes = 0

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none, after it has ended, or when it has to be replaced."""
        process = self._process
        # Somebody killed it, or the work done so far has left too much in use.
        if process is not None and (
            process.poll() is not None or _address_space(process.pid) > self._idle_bytes + self.limits.num_bytes
        ):
            self._end()
        return None if self._process is None else self._process.pid

    def start(self, setup: Any) -> None:
        """Start the process.

        Args:
            setup: what `serve` gives to the script, as JSON.

        Raises:
            EngineError: it did not start.
            WorkFailed: the script refuses `setup`.
        """
        # The file itself, not a package's module: no program's `__main__` is involved, and no folder of its user.
        setup_line = json.dumps(setup)
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment["PYTHONUTF8"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the parent
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a process that stands still must not stop its parent
        self._stop = weakref.finalize(self, _stop, self._process)
        answer = self._ask(setup_line, MAX_START_S)
        if answer is None:
            raise EngineError(f"the process of {self._script.name} did not start (exit status {self._end()})")
        if "failed" in answer:
            self._end()
            raise WorkFailed(answer["failed"])
        self._idle_bytes = _address_space(self._process.pid)

    def ask(self, work: str) -> dict[str, Any]:
        """The answer to a piece of work, given as JSON on one line.

        Raises:
            WorkFailed, LimitExceeded: there is none.
        """
        answer = self._ask(work, self.limits.wall_s)
        if answer is None:
            status = self._end()
            if status == -signal.SIGXCPU:
                raise LimitExceeded(f"takes more than {self.limits.cpu_s} s of CPU time")
            if status == -signal.SIGKILL:
                raise LimitExceeded(f"takes more than {self.limits.wall_s:.0f} s")
            raise LimitExceeded("is too large or too deeply nested")
        if "failed" in answer:
            raise WorkFailed(answer["failed"])
        if "exceeded" in answer:
            raise LimitExceeded(answer["exceeded"])
        return answer

    def _ask(self, line: str, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process has ended or had to be killed."""
        process = self._process
        assert process is not None
        try:
            return self._exchange(process, line, timeout_s)
        except BaseException:  # such as Ctrl-C: the answer that is still to come must not become the next one's
            process.kill()
            self._end()
            raise

    @staticmethod
    def _exchange(process: "subprocess.Popen[bytes]", line: str, timeout_s: float) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        unsent = memoryview(line.encode() + b"\n")
        parts: list[bytes] = []
        with selectors.PollSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (parts and parts[-1].endswith(b"\n")):
                ready = selector.select(deadline - time.monotonic()) if time.monotonic() < deadline else []
                if not ready:
                    process.kill()
                    return None
                for key, _ in ready:
                    if key.fileobj is process.stdout:
                        part = os.read(key.fd, READ_BYTES)
                        if not part:
                            return None
                        parts.append(part)
                    else:
                        try:
                            unsent = unsent[os.write(key.fd, unsent) :]
                        except BrokenPipeError:
                            return None
                        if not unsent:
                            selector.unregister(process.stdin)
        found: dict[str, Any] = json.loads(b"".join(parts))
        return found

    def _end(self) -> int:
        """End the process and return its exit status."""
        process = self._process
        assert process is not None
        self._process = None
        self._stop()
        return process.returncode


def _stop(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


Work = Callable[[Any], dict[str, Any]]


def serve(prepare: Callable[[Any], Work], limits: Limits) -> None:
    """The process: work until the parent ends.

    Args:
        prepare: takes the parent's `setup`, and returns what does a piece of work. An exception of the work is its
            answer.
        limits: of each piece.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.stack_size(limits.stack_bytes)
    threading.Thread(target=_work, args=(prepare, limits, lines, answers), daemon=True).start()
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the parent has gone, whatever is being done


def _work(prepare: Callable[[Any], Work], limits: Limits, lines: "queue.SimpleQueue[str]", answers: BinaryIO) -> None:
    answer = _line()
    try:
        work = prepare(json.loads(lines.get()))
    except BaseException as error:  # panics of extensions among them
        answer = _line(failed=cut(str(error), MAX_ERROR_CHARS) or type(error).__name__)
    while True:
        answers.write(answer)
        answers.flush()
        line = lines.get()
        try:
            _limit(limits)
            answer = _line(**work(json.loads(line)))
        except RecursionError:
            answer = _line(exceeded="is too deeply nested")
        except MemoryError:
            answer = _line(exceeded=f"takes more than {limits.num_bytes >> 20} MiB")
        except BaseException as error:  # panics of extensions among them
            answer = _line(failed=cut(str(error), MAX_ERROR_CHARS) or f"cannot be read ({type(error).__name__})")


def _line(**answer: Any) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _address_space(pid: int) -> int:
    """Size of a process's address space in bytes; 0 where there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def _limit(limits: Limits) -> None:
    """Set the limits for the next piece of work; beyond them the kernel ends the process, or allocations fail."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime) + limits.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    num_bytes = _address_space(os.getpid())
    if num_bytes:  # otherwise there is no limit of memory
        num_bytes += limits.num_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if most < 0 else min(num_bytes, most), most))
