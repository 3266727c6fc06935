"""Grammars for structured outputs, based on llguidance: which tokens may come next in a constrained text.

llguidance comes with the extra `structured` and is imported when the first request asks for a form.
"""

import json
import threading
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING

from treadle.core.errors import InvalidRequestError, MissingPackageError
from treadle.core.extras import extra
from treadle.core.structured_outputs import StructuredOutputsParams
from treadle.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

FIELD = "structured_outputs"
KEPT_GRAMMARS = 128
"""Size of the cache of compiled grammars."""


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
        return self.backend.get_error().partition("\n")[0] if self.backend.is_error() else None

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

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits.
        eos_token_ids: allowed where the text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._in_use: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._compile_text = lru_cache(KEPT_GRAMMARS)(self._compile)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile `params`.

        Raises:
            InvalidRequestError: the grammar is invalid, or the model has no end-of-sequence token.
        """
        if not self._eos_token_ids:
            raise InvalidRequestError(FIELD, "require a model with an end-of-sequence token")
        try:
            with extra("structured", "an answer of a given form"):
                text = _grammar_text(params)
        except MissingPackageError as error:
            raise InvalidRequestError(FIELD, str(error)) from error
        except ValueError as error:
            raise InvalidRequestError(FIELD, str(error)) from None
        return self.find(text)

    def find(self, text: str) -> Grammar:
        """The compiled grammar of `text`: one that a request still holds, one that is kept, or a new one.

        Args:
            text: the grammar, as llguidance reads it.
        """
        in_use = self._in_use.get(text)
        if in_use is None:
            in_use = self._in_use[text] = self._compile_text(text)
        return in_use

    def _compile(self, text: str) -> Grammar:
        import llguidance

        matcher = llguidance.LLMatcher(self._get_vocabulary(), text, log_level=0)
        if matcher.is_error():
            raise InvalidRequestError(FIELD, matcher.get_error().strip())
        return Grammar(text, matcher)

    def _get_vocabulary(self) -> "llguidance.LLTokenizer":
        """The vocabulary in llguidance's form, built for the first request (a quarter of a second)."""
        import llguidance

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
                )
            return self._vocabulary


def _grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's syntax."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher = llguidance.LLMatcher
    if params.is_json:
        schema = {"type": "object"} if params.json is None else params.json
        options: JsonCompileOptions = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        return matcher.grammar_from_json_schema(
            schema if isinstance(schema, str) else json.dumps(schema), overrides=options
        )
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in params.choice))
    assert params.grammar is not None
    return matcher.grammar_from_lark(any_to_lark(params.grammar))
