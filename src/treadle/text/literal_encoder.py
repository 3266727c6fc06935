"""Encodes texts in which some parts that spell control tokens are ordinary text."""

import re
from collections.abc import Sequence

import tokenizers


class LiteralEncoder:
    """Encodes as the tokenizer does, except that literal parts never become control tokens.

    The tokenizer splits a text at control tokens first and encodes what is between them independently. So does
    this; only which control tokens count is decided here.

    Args:
        backend: the tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._special = {token.content: token for token in added if token.special and token.content}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._first = self._later = tokenizers.Tokenizer.from_str(backend.to_str())
        self._first.encode_special_tokens = True
        if '"prepend_scheme":"first"' in self._first.to_str():  # only the start of a text gets a space
            self._later = tokenizers.Tokenizer.from_str(
                self._first.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
            )
            self._later.encode_special_tokens = True

    def encode(self, text: str, literals: Sequence[tuple[int, int]], add_special_tokens: bool) -> list[int]:
        """Token ids.

        Args:
            text: the text.
            literals: parts of it that are ordinary text, as (start, end), in order and disjoint.
            add_special_tokens: whether to add the model's special tokens, such as BOS.
        """
        pieces: list[tokenizers.Encoding] = []
        taken = 0
        for start, end in self._control_tokens(text, literals):
            token = self._special[text[start:end]]
            before = text[taken:start]
            pieces += self._ordinary(before.rstrip() if token.lstrip else before, taken == 0)
            pieces.append(self._backend.encode(text[start:end], add_special_tokens=False))
            taken = end
            if token.rstrip:
                taken += len(text[end:]) - len(text[end:].lstrip())
        pieces += self._ordinary(text[taken:], taken == 0)
        whole = tokenizers.Encoding.merge(pieces, growing_offsets=False)
        if add_special_tokens:
            whole = self._backend.post_process(whole, None, True)
        ids: list[int] = whole.ids
        return ids

    def _control_tokens(self, text: str, literals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where the control tokens are that count."""
        found = []
        position = 0
        for start, end in (*literals, (len(text), len(text))):
            found += [match.span() for match in self._pattern.finditer(text, position, start)]
            position = end
        return found

    def _ordinary(self, text: str, is_first: bool) -> list[tokenizers.Encoding]:
        backend = self._first if is_first else self._later
        return [backend.encode(text, add_special_tokens=False)] if text else []
