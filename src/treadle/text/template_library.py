"""Compiles and renders chat templates with Jinja, like Hugging Face transformers.

They run in jinja2's immutable sandbox, with the same extensions as in transformers (`raise_exception`,
`strftime_now`, `tojson` without HTML escapes, loop controls and the `generation` block).
"""

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the body of the block unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def compile_template(source: str) -> jinja2.Template:
    """Compile the Jinja text; raises whatever jinja2 raises, which may be any exception."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class Marker:
    """Tells apart the control tokens that a template writes from those that a message spells.

    What spells one in a message, or may become one together with the text around it, is replaced by a unique word
    before a template is rendered, and put back afterwards.

    Args:
        control_tokens: as text.
    """

    def __init__(self, control_tokens: Sequence[str]) -> None:
        tokens = sorted({token for token in control_tokens if token}, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._starts = {token[:length] for token in tokens for length in range(1, len(token))}
        self._ends = {token[-length:] for token in tokens for length in range(1, len(token))}
        self._most = max(map(len, tokens), default=1) - 1

    def mark(self, value: Any, words: "Words") -> Any:
        """`value`, with words in place of what spells a control token in any text in it."""
        if self._whole is None:
            return value
        if isinstance(value, str):
            return self._mark_text(value, words)
        if isinstance(value, dict):
            return {self.mark(key, words): self.mark(inner, words) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mark(inner, words) for inner in value]
        return value

    def _mark_text(self, text: str, words: "Words") -> str:
        assert self._whole is not None
        spans = [match.span() for match in self._whole.finditer(text)]
        # The start and the end, with and without the blanks that a template may strip.
        first = len(text) - len(text.lstrip())
        last = len(text.rstrip())
        edges = [(start, start + self._longest(text[start:], self._ends, True)) for start in {0, first}]
        edges += [(end - self._longest(text[:end], self._starts, False), end) for end in {last, len(text)}]
        taken = 0
        parts = []
        for start, end in sorted({*spans, *edges}, key=lambda span: (span[0], -span[1])):
            if start >= taken and end > start:
                parts += [text[taken:start], words.word_for(text[start:end])]
                taken = end
        return "".join([*parts, text[taken:]])

    def _longest(self, text: str, parts: set[str], at_start: bool) -> int:
        for length in range(min(self._most, len(text)), 0, -1):
            if (text[:length] if at_start else text[-length:]) in parts:
                return length
        return 0


class Words:
    """Unique words that stand for texts in one rendering."""

    def __init__(self) -> None:
        nonce = secrets.token_hex(8)
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._start = f"q{nonce}i"
        self._pattern = re.compile(rf"{self._start}(\d+)z", re.IGNORECASE)  # templates may change the case

    def word_for(self, text: str) -> str:
        """The word for a text."""
        number = self._numbers.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return f"{self._start}{number}z"

    def put_back(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """A rendered text with the texts in place of their words, and where they are, as (start, end)."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = taken = 0
        for match in self._pattern.finditer(text):
            before, own = text[taken : match.start()], self._texts[int(match[1])]
            parts += [before, own]
            length += len(before)
            spans.append((length, length + len(own)))
            length += len(own)
            taken = match.end()
        return "".join([*parts, text[taken:]]), spans
