"""Incremental detokenization."""

from collections.abc import Iterable

from treadle.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns a stream of tokens into pieces of text that join to exactly the decoding of all tokens.

    No piece ends within a UTF-8 character. For each new token only a window of the last tokens is decoded
    again::

        ids:   … │ context │ pending │
                 └ already emitted; decoded again, because decoders treat the start of a text differently

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the new text that later tokens cannot change."""
        pieces = []
        for token_id in token_ids:
            # A model may have more ids than its tokenizer; those have no text.
            if token_id in self._skipped or not self._tokenizer.has(token_id):
                continue
            self._ids.append(token_id)
            # A run of byte tokens is decoded together: an invalid byte changes the text of the bytes before it.
            if token_id in self._tokenizer.byte_values:
                continue
            text = self._decode()
            if len(text) > len(self._context_text) and not text.endswith(REPLACEMENT):
                pieces.append(self._show(text))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest of the text, after the last token; an incomplete character becomes U+FFFD."""
        return self._show(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

    def _show(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._context_text = self._decode()
        return piece
