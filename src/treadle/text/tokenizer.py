"""Conversion between text and token ids with the `tokenizers` library."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers

from treadle.core.errors import InvalidRequestError, ModelLoadError
from treadle.text.chat_template import RenderedChat
from treadle.text.literal_encoder import LiteralEncoder

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

_PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_LEVEL_ALPHABET = {chr(byte): byte for byte in _PRINTABLE_BYTES} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE_BYTES)))
}
"""The character that stands for each byte in byte-level BPE (GPT-2) → the byte."""


def _as_exception(error: BaseException) -> Exception:
    """An error of the `tokenizers` library as an Exception, which its panics are not; raises any other error."""
    if isinstance(error, Exception):
        return error
    if type(error).__name__ == "PanicException":
        return ValueError(f"the tokenizers library failed: {error}")
    raise error


@contextmanager
def _refusals() -> Iterator[None]:
    """A text that the tokenizer cannot encode is an InvalidRequestError."""
    try:
        yield
    except BaseException as error:
        problem = _as_exception(error)
        raise InvalidRequestError("prompt", f"the model's tokenizer cannot encode it ({problem})") from problem


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the wrapped tokenizer.
        bos_token, eos_token: as text, for chat templates; None if the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        decoders = _decoder_types(backend)
        # Byte-fallback tokens stand for single bytes; whether they form text is known only at the end of a run.
        self.byte_values: dict[int, int] = {}
        if "ByteFallback" in decoders:
            self.byte_values = {
                token_id: int(token[3:5], 16)
                for token, token_id in backend.get_vocab().items()
                if _BYTE_TOKEN.fullmatch(token)
            }
        self._is_byte_level = "ByteLevel" in decoders
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[tuple[int, bool], bytes] = {}
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_file(cls, path: Path, *, bos_token: str | None = None, eos_token: str | None = None) -> "Tokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ModelLoadError: the file cannot be read.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:
            problem = _as_exception(error)
            raise ModelLoadError(f"{path}: cannot be read as a tokenizer ({problem})") from problem
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, bos_token=bos_token, eos_token=eos_token)

    @cached_property
    def max_token_chars(self) -> int:
        """Upper bound on the characters of text that one token stands for."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The control tokens, as text."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(added[token_id].content for token_id in sorted(self.special_token_ids))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer knows the id."""
        return self.backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token given as text; None if there is no such token."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds the model's special tokens, such as BOS.

        A text that spells a control token becomes that token, except where a RenderedChat says that it is literal.

        Raises:
            InvalidRequestError: the tokenizer has no tokens for the text.
        """
        (ids,) = self.encode_batch([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, in parallel; as in `encode`."""
        literal = {i for i, text in enumerate(texts) if isinstance(text, RenderedChat) and text.literals}
        with _refusals():
            plain = iter(
                self.backend.encode_batch(
                    [text for i, text in enumerate(texts) if i not in literal], add_special_tokens=add_special_tokens
                )
                if len(literal) < len(texts)
                else ()
            )
            return [
                self._literal.encode(text, text.literals, add_special_tokens)  # type: ignore[attr-defined]
                if i in literal
                else next(plain).ids
                for i, text in enumerate(texts)
            ]

    @cached_property
    def _literal(self) -> LiteralEncoder:
        return LiteralEncoder(self.backend)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        try:
            text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _as_exception(error) from error
        return text

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """The bytes that a token, special or not, adds to a text in UTF-8; possibly a part of a character.

        Args:
            token_id: the token; one that the tokenizer does not know has no bytes.
            at_start: whether it is the first of the text, where some tokenizers drop a space.
        """
        found = self._token_bytes.get((token_id, at_start))
        if found is None:
            found = self._token_bytes[token_id, at_start] = self._find_bytes(token_id, at_start)
        return found

    def _find_bytes(self, token_id: int, at_start: bool) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        byte = self.byte_values.get(token_id, 0)
        if byte >= 0x80:
            return bytes((byte,))
        if self._is_byte_level:
            # A token with a character outside the alphabet is an added one, and stands for itself.
            values = [_BYTE_LEVEL_ALPHABET.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        # The text of a token depends on whether another one precedes it.
        before = [] if at_start else self._anchor
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return text.removeprefix(self.decode(before, skip_special_tokens=False)).encode()

    @cached_property
    def _anchor(self) -> list[int]:
        """A word, for what follows a word."""
        return self.encode("a", add_special_tokens=False)[:1]

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special or not; cached, because the same few tokens recur."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode((token_id,), skip_special_tokens=False)
        return text


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    """The kinds of decoders that a tokenizer applies, such as "ByteLevel"."""
    if backend.decoder is None:
        return set()
    found = json.loads(backend.decoder.__getstate__())
    return {decoder["type"] for decoder in found.get("decoders", [found])}
