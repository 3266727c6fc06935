"""A process in which grammars are compiled first: one that crashes or stalls there harms only its own request.

The parent writes a line of JSON for each grammar and reads one. The process starts with the first grammar, ends with
the parent (end of file), and is replaced after a crash or a timeout. It is given neither the parent's threads nor its
environment.
"""

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from treadle.core.errors import EngineError, InvalidRequestError
from treadle.text.tokenizer import Tokenizer

FIELD = "structured_outputs"
STACK_BYTES = 8 * 2**20
"""Stack of the thread that compiles: bounds how deep a grammar may be nested. The parent must have more."""
MAX_CPU_S = 3
MAX_WALL_S = 20.0
MAX_START_S = 60.0
MAX_BYTES = 512 * 2**20
"""How much memory compiling may take beyond that of an idle process."""
MAX_ERROR_CHARS = 300
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME")


class GrammarProcess:
    """The parent's end. Not thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_args = (vocab_size, eos_token_ids)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def compile(self, params: str) -> str:
        """Check that a grammar can be compiled.

        Args:
            params: StructuredOutputsParams as JSON.

        Returns:
            The grammar, as llguidance reads it.

        Raises:
            InvalidRequestError: it is invalid, or compiling it failed or took too much.
            EngineError: no process could be started.
        """
        if self._process is not None and self._process.poll() is not None:  # somebody killed it
            self._end()
        if self._process is None:
            self._start()
        answer = self._ask(params, MAX_WALL_S)
        if answer is None:
            status = self._end()
            if status == -signal.SIGXCPU:
                raise InvalidRequestError(
                    FIELD, f"takes more than {MAX_CPU_S} s of CPU time to compile; simplify the grammar"
                )
            if status == -signal.SIGKILL:
                raise InvalidRequestError(
                    FIELD, f"takes more than {MAX_WALL_S:.0f} s to compile; simplify the grammar"
                )
            raise InvalidRequestError(FIELD, "is too large or too deeply nested to compile; simplify the grammar")
        if "error" in answer:
            raise InvalidRequestError(FIELD, answer["error"])
        text: str = answer["text"]
        return text

    def _start(self) -> None:
        # The file itself, not a package's module: no program's `__main__` is involved, and no folder of its user.
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the parent
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        if self._ask(json.dumps([self._tokenizer.backend.to_str(), *self._vocabulary_args]), MAX_START_S) is None:
            raise EngineError(f"the process that compiles grammars did not start (exit status {self._end()})")

    def _ask(self, line: str, timeout_s: float) -> dict[str, Any] | None:
        """The answer; None if the process has ended or had to be killed."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
            timer.join()
        if not answer.endswith(b"\n"):
            return None
        found: dict[str, Any] = json.loads(answer)
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


def main() -> None:
    """The process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_work, args=(lines, answers), daemon=True).start()
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the parent has gone, whatever is being compiled


def _work(lines: "queue.SimpleQueue[str]", answers: Any) -> None:
    from treadle.text.grammar_library import compile_text, grammar_text, make_vocabulary, try_first_token

    vocabulary = make_vocabulary(*json.loads(lines.get()))
    answer: dict[str, str] = {}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        params = lines.get()
        _limit()
        try:
            text = grammar_text(json.loads(params))
            try_first_token(compile_text(vocabulary, text))
            answer = {"text": text}
        except RecursionError:
            answer = {"error": "is too deeply nested to compile; simplify the grammar"}
        except MemoryError:
            answer = {"error": f"takes more than {MAX_BYTES >> 20} MiB to compile; simplify the grammar"}
        except BaseException as error:  # llguidance's panics among them
            answer = {"error": _short(str(error)) or f"cannot be read ({type(error).__name__})"}


def _limit() -> None:
    """Set the limits for the next grammar; beyond them the kernel ends the process, or allocations fail."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime) + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if most < 0 else min(seconds, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(FileNotFoundError):  # where there is no /proc, there is no limit of memory
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        num_bytes = pages * resource.getpagesize() + MAX_BYTES
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes if most < 0 else min(num_bytes, most), most))


def _short(message: str) -> str:
    return message if len(message) <= MAX_ERROR_CHARS else message[:MAX_ERROR_CHARS] + " …"


if __name__ == "__main__":
    main()
