"""Renders a conversation to a prompt with the model's own Jinja template, like Hugging Face transformers.

Templates come with models and are not trusted: they run in jinja2's immutable sandbox, with the same
extensions as in transformers (`raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop
controls and the `generation` block).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.core.errors import InvalidRequestError, ModelLoadError


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


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        bos_token, eos_token: values of these template variables; None leaves one undefined.
        origin: the file that it comes from, for messages.

    Raises:
        ModelLoadError: the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        origin: str = "the model",
    ) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # deep nesting and constant expressions make jinja2 raise any Python exception
            raise ModelLoadError(f"{origin}: the chat template is not valid ({error})") from error
        # Templates test whether a token is defined, so a missing token must stay undefined.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: mappings with `role` and `content`, oldest first.
            add_generation_prompt: end with the start of the assistant's turn.
            extra: additional template variables.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens, **extra
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError("messages", f"the model's chat template refused them: {error}") from error
        except Exception as error:  # a template can raise any Python exception
            raise InvalidRequestError("messages", f"the model's chat template failed: {error!r}") from error

    def ending(self) -> str:
        """What follows an assistant's message, without leading whitespace; empty if the template refuses one."""
        reply = "treadle"
        messages = [{"role": "user", "content": "weave"}, {"role": "assistant", "content": reply}]
        try:
            _, found, ending = self.render(messages, add_generation_prompt=False).rpartition(reply)
        except InvalidRequestError:
            return ""
        return ending.lstrip() if found else ""


def check_messages(messages: Any) -> None:
    """Raise InvalidRequestError unless `messages` is a non-empty list of mappings with role and content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages", "is empty; a conversation needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{i}]", f"must be a mapping, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}].role", f"must be a string, got {message.get('role')!r}")
        if not isinstance(message.get("content"), str):
            raise InvalidRequestError(f"messages[{i}].content", f"must be a string, got {message.get('content')!r}")
