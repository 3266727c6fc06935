"""Grammars for structured outputs, based on llguidance: which tokens may come next in a constrained text.

llguidance comes with the extra `structured` and is imported when the first request asks for a form.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from treadle.core.errors import InvalidRequestError, MissingPackageError
from treadle.core.extras import extra
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.text.grammar_library import compile_text, error_of, make_vocabulary
from treadle.text.grammar_process import FIELD, LIMITS, GrammarProcess
from treadle.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

KEPT_GRAMMARS = 32
"""Compiled grammars that are kept when no request holds them."""
KEPT_ANSWER_BYTES = 64 * 2**20
"""Memory for grammars, compiled or refused, of which the process need not be asked again."""
PARENT_STACK_BYTES = 2 * LIMITS.stack_bytes
"""What compiles in the process compiles here, with room to spare."""


class Grammar:
    """A compiled grammar.

    Args:
        text: the grammar, as llguidance reads it.
        start: a matcher that has seen nothing; it stays so.
    """

    def __init__(self, text: str, start: "llguidance.LLMatcher") -> None:
        self.text = text
        self._start = start

    def matcher(self) -> "Matcher":
        """A new matcher, at the start of a text."""
        return Matcher(self._start.deep_copy())


class Matcher:
    """The state of one sequence in its grammar.

    It depends on the sequence's tokens alone, so a sequence may be preempted, forked, or (in a beam search) replaced
    by another: tokens that no longer match are rolled back.
    """

    def __init__(self, matcher: "llguidance.LLMatcher") -> None:
        self.backend = matcher
        self._seen: list[int] = []

    @property
    def error(self) -> str | None:
        """Why matching failed; None while it has not."""
        return error_of(self.backend) if self.backend.is_error() else None

    def follow(self, token_ids: list[int]) -> None:
        """Advance or roll back to the output `token_ids`."""
        seen = self._seen
        common = len(seen)
        if token_ids[:common] != seen:
            common = next(i for i, old in enumerate(seen) if i >= len(token_ids) or token_ids[i] != old)
            self.backend.rollback(len(seen) - common)
        self.backend.consume_tokens(token_ids[common:])
        self._seen = token_ids


class GrammarCompiler:
    """Compiles the constraints of requests. Thread-safe.

    What a client sends is compiled in another process first; what passes there is compiled here, in a thread of its
    own. Neither holds up the caller of `submit`.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits.
        eos_token_ids: allowed where the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocabulary_args = (tokenizer, vocab_size, sorted(eos_token_ids))
        self.process = GrammarProcess(*self._vocabulary_args)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._answers: dict[str, _Answer] = {}  # by what was asked, the oldest first
        self._answer_bytes = 0
        self._kept: deque[Grammar] = deque(maxlen=KEPT_GRAMMARS)
        self._in_use: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile `params`, and wait for it.

        Raises:
            InvalidRequestError: the grammar is invalid, compiling it took too much, or the model has no
                end-of-sequence token.
            EngineError: the process that compiles grammars could not be started.
        """
        return self.submit(params).result()

    def submit(self, params: StructuredOutputsParams) -> "Future[Grammar]":
        """Compile `params` in another thread; the future raises what `compile` does."""
        if not self._vocabulary_args[2]:
            raise InvalidRequestError(FIELD, "require a model with an end-of-sequence token")
        try:
            with extra("structured", "an answer of a given form"):
                import llguidance  # noqa: F401 - whether it is there
        except MissingPackageError as error:
            raise InvalidRequestError(FIELD, str(error)) from error
        try:
            key = params.to_json()
        except RecursionError:
            raise InvalidRequestError(f"{FIELD}.json", "is too deeply nested; simplify it") from None
        answer = self._answers.get(key)
        known = None if answer is None or answer.text is None else self._in_use.get(answer.text)
        if known is not None:
            future: Future[Grammar] = Future()
            future.set_result(known)
            return future
        return self._submit(self._compile_params, key)

    def find(self, text: str) -> Grammar:
        """The compiled grammar of `text`: one that a request still holds, one that is kept, or a new one.

        Args:
            text: the grammar, as llguidance reads it, of a request that `compile` has accepted.
        """
        return self._in_use.get(text) or self._submit(self._compile_text, text).result()

    def _submit(self, function: Callable[[str], Grammar], argument: str) -> "Future[Grammar]":
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "treadle-grammars")
                stack_size = threading.stack_size(PARENT_STACK_BYTES)
                try:
                    return self._thread.submit(function, argument)  # starts the thread
                finally:
                    threading.stack_size(stack_size)
            return self._thread.submit(function, argument)

    # In the thread:

    def _compile_params(self, key: str) -> Grammar:
        answer = self._answers.get(key)
        if answer is None:
            try:
                answer = _Answer(self.process.compile(key), None)
            except InvalidRequestError as error:
                if self.process.pid is None:  # it may have been the machine's fault: not to be remembered
                    raise
                answer = _Answer(None, error.problem)
            self._keep(key, answer)
        if answer.text is None:
            assert answer.problem is not None
            raise InvalidRequestError(FIELD, answer.problem)
        return self._compile_text(answer.text)

    def _keep(self, key: str, answer: "_Answer") -> None:
        """Remember an answer; of those that are too much, the oldest are forgotten."""
        self._answers[key] = answer
        self._answer_bytes += answer.num_bytes(key)
        while self._answer_bytes > KEPT_ANSWER_BYTES:
            oldest = next(iter(self._answers))
            self._answer_bytes -= self._answers.pop(oldest).num_bytes(oldest)

    def _compile_text(self, text: str) -> Grammar:
        grammar = self._in_use.get(text)
        if grammar is None:
            if self._vocabulary is None:
                tokenizer, vocab_size, eos_token_ids = self._vocabulary_args
                self._vocabulary = make_vocabulary(tokenizer.backend.to_str(), vocab_size, eos_token_ids)
            try:
                matcher = compile_text(self._vocabulary, text)
            except ValueError as error:
                raise InvalidRequestError(FIELD, str(error)) from None
            grammar = self._in_use[text] = Grammar(text, matcher)
            self._kept.append(grammar)
        return grammar


class _Answer(NamedTuple):
    """What the process said of a grammar: how llguidance reads it, or what is wrong with it."""

    text: str | None
    problem: str | None

    def num_bytes(self, key: str) -> int:
        """The memory that the answer takes, with what was asked."""
        return sum(map(sys.getsizeof, (key, self, *self)))
