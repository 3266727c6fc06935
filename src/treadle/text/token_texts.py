"""The part of a text that each token of a sequence stands for."""

import codecs

from treadle.text.tokenizer import Tokenizer


class TokenTexts:
    """Follows a sequence and tells what each token adds to its text.

    A token may end within a UTF-8 character. Such a part has no text; the token that completes the character has all
    of it::

        bytes   "a"   F0 9F   98 80   "b"
        text    "a"   ""      "😀"    "b"

    Args:
        tokenizer: the model's tokenizer.
        skip_special_tokens: whether the text of the sequence leaves special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._is_at_start = True
        self._part = b""  # of a character
        self._run = b""  # of byte-fallback tokens
        self._run_start = 0
        self._length = 0

    @property
    def length(self) -> int:
        """Characters of the text before the next token. A character that is not complete yet does not count."""
        return self._length

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token that may be the next."""
        return self._tokenizer.token_bytes(token_id, at_start=self._is_at_start)

    def text_of(self, token_id: int) -> str:
        """The text of a token that may be the next; bytes that are not UTF-8 are left out."""
        part = b"" if token_id in self._skipped else self._part
        return codecs.utf_8_decode(part + self.bytes_of(token_id), "ignore", False)[0]

    def push(self, token_id: int) -> str:
        """Take the next token; returns its text, in which bytes that are not UTF-8 are U+FFFD.

        A special token that the text leaves out is returned, but does not count.
        """
        if token_id in self._skipped:
            return self.text_of(token_id)
        byte = self._tokenizer.byte_values.get(token_id)
        if byte is None:
            self._end_run()
        elif self._run:
            self._run += bytes((byte,))
        else:
            self._run, self._run_start = bytes((byte,)), self._length
        data = self._part + self.bytes_of(token_id)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._part = data[num_used:]
        self._length += len(text)
        self._is_at_start = self._is_at_start and not self._tokenizer.has(token_id)
        return text

    def _end_run(self) -> None:
        """Byte fallback decodes a whole run at once: if one byte is invalid, every byte is a U+FFFD."""
        try:
            self._run.decode()
        except UnicodeDecodeError:
            self._length = self._run_start + len(self._run)
            self._part = b""
        self._run = b""
