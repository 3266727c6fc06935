"""Renders a conversation to a prompt with the model's own Jinja template."""

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.core.errors import InvalidRequestError, ModelLoadError
from treadle.core.limited_process import LimitExceeded, WorkFailed
from treadle.text.template_process import process

RESERVED_VARIABLES = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class RenderedChat(str):
    """A prompt made by a chat template.

    Attributes:
        literals: where a message spells a control token or a part of one, as (start, end) in order; these are
            ordinary text, which a Tokenizer encodes as such.
    """

    literals: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, literals: Sequence[tuple[int, int]] = ()) -> "RenderedChat":  # noqa: D102
        self = super().__new__(cls, text)
        self.literals = tuple(literals)
        return self


class ChatTemplate:
    """A chat template. Templates come with models and are not trusted: they run in a process of their own.

    Args:
        source: the Jinja text.
        bos_token, eos_token: values of these template variables; None leaves one undefined.
        origin: the file that it comes from, for messages.

    Attributes:
        control_tokens: tokens, as text, that only the template can produce: in a message they are ordinary text.

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
        self.control_tokens: tuple[str, ...] = ()
        # Templates test whether a token is defined, so a missing token must stay undefined.
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        try:
            process.check(source)
        except WorkFailed as error:
            raise ModelLoadError(f"{origin}: the chat template is not valid ({error})") from None
        except LimitExceeded as error:
            raise ModelLoadError(f"{origin}: the chat template is not valid (it {error} to compile)") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt for a conversation.

        Args:
            messages: mappings with `role` and `content`, oldest first.
            add_generation_prompt: end with the start of the assistant's turn.
            variables: additional template variables.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        check_messages(messages)
        variables = variables or {}
        taken = RESERVED_VARIABLES & set(variables)
        if taken:
            raise InvalidRequestError("chat_template_kwargs", f"{sorted(taken)[0]!r} is set by the server")
        own = {**self._tokens, "add_generation_prompt": add_generation_prompt}
        try:
            text, spans = process.render(
                self.source, self.control_tokens, [dict(message) for message in messages], {**variables}, own
            )
        except WorkFailed as error:
            raise InvalidRequestError("messages", f"the model's chat template refused them: {error}") from None
        except LimitExceeded as error:
            raise InvalidRequestError("messages", f"rendering the model's chat template {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError("messages", f"cannot be written as JSON: {error}") from None
        return RenderedChat(text, spans)

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
