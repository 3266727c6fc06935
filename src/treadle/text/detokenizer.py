"""Text from tokens, piece by piece."""

from collections.abc import Iterable

from treadle.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns a stream of tokens into pieces of text that join to exactly the decoding of all tokens.

    No piece ends within a UTF-8 character. Only a window of the last tokens is decoded again for each new
    one::

        ids:   … │ context │ pending │
                 └ already shown; decoded along, because decoders treat the start of a text in their own way

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take further tokens; returns the text that is certain now and was not shown before."""
        pieces = []
        for token_id in token_ids:
            # Models may have more ids than their tokenizer; those have no text.
            if token_id in self._skipped or not self._tokenizer.has(token_id):
                continue
            self._ids.append(token_id)
            # Byte tokens become text together: an invalid one changes how those before it are shown.
            if token_id in self._tokenizer.byte_token_ids:
                continue
            text = self._decode()
            if len(text) > len(self._context_text) and not text.endswith(REPLACEMENT):
                pieces.append(self._show(text))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, after the last token; an unfinished character shows as U+FFFD."""
        return self._show(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _show(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._context_text = self._decode()
        return piece
