"""A process in which chat templates are compiled and rendered.

Templates come with models and messages come from clients: together they may loop or take any amount of memory.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from treadle.core.forks import check_not_forked
from treadle.core.limited_process import LimitedProcess, Limits, Work, serve

T = TypeVar("T")

LIMITS = Limits(cpu_s=2, wall_s=20.0, num_bytes=512 * 2**20, stack_bytes=8 * 2**20)


class TemplateProcess:
    """The parent's end. Thread-safe; templates are rendered one after the other."""

    def __init__(self) -> None:
        self._process = LimitedProcess(Path(__file__), LIMITS)
        self._lock = threading.Lock()
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}  # their numbers in the process
        self._thread = ThreadPoolExecutor(1, "treadle-templates")  # starts when it has work

    def render(
        self, source: str, control_tokens: Sequence[str], messages: Any, variables: Any, own: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a template.

        Args:
            source: the Jinja text.
            control_tokens: those which messages cannot produce.
            messages, variables: from a client, as JSON has them.
            own: variables from the model.

        Returns:
            The text, and where in it a message spells a control token, as (start, end).

        Raises:
            WorkFailed, LimitExceeded: it cannot be compiled or rendered, or takes too much.
            ValueError, TypeError: `messages` or `variables` cannot be written as JSON.
            EngineError: no process could be started.
        """
        template = (source, tuple(control_tokens))
        work = json.dumps([messages, variables, own])
        with self._lock:
            number = self._number_of(template)
            answer = self._process.ask(f'[{number}, "render", {work}]')
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def check(self, source: str) -> None:
        """Compile a template; raises as `render` does."""
        with self._lock:
            self._number_of((source, ()))

    def _number_of(self, template: tuple[str, tuple[str, ...]]) -> int:
        """The number that the process knows a template by."""
        check_not_forked()
        if self._process.pid is None:
            self._known.clear()
            self._process.start(None)
        number = self._known.get(template)
        if number is None:
            number = len(self._known)
            self._process.ask(json.dumps([number, "compile", template]))
            self._known[template] = number
        return number

    def submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Call `function`, which renders, in the thread that waits for this process."""
        return self._thread.submit(function, *args)


process = TemplateProcess()
"""One for all models of this program: it starts in a tenth of a second and takes some 30 MiB."""


def _prepare(setup: Any) -> Work:
    from treadle.text.template_library import Marker, Words, compile_template

    compile_once = cache(compile_template)  # a model's template comes without control tokens first, then with them
    templates: dict[int, tuple[Any, Marker]] = {}

    def work(asked: Any) -> dict[str, Any]:
        number, what, given = asked
        if what == "compile":
            source, control_tokens = given
            templates[number] = compile_once(source), Marker(control_tokens)
            return {}
        template, marker = templates[number]
        words = Words()
        messages, variables, own = given
        variables = {**marker.mark(variables, words), **own, "messages": marker.mark(messages, words)}
        text, spans = words.put_back(template.render(variables))
        return {"text": text, "spans": spans}

    return work


if __name__ == "__main__":
    serve(_prepare, LIMITS)
