"""Stop strings in a stream of text."""

from bisect import bisect_left
from collections.abc import Sequence


class StopStringMatcher:
    """Holds back text that may be the start of a stop string, and finds the first stop string.

    The cost of a piece of text depends on its own length: each of its characters is compared with the end of every
    stop string, and moves the start of the text that is held back by at most one character.

    Args:
        stop_strings: non-empty strings.
        include_in_output: include the stop string in the text.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._sorted = sorted(self._stop_strings)
        self._max_held = max(map(len, self._stop_strings), default=1) - 1
        self._include_in_output = include_in_output
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text; None until then."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add text; returns the text that can be emitted now. Once `found` is set, the text has ended.

        Args:
            text: the new text.
            may_stop: False while the output is too short to stop; no stop string may start in such text.
        """
        if not may_stop:
            return self.flush() + text
        num_held = len(self._held)
        text = self._held + text
        # The text held back contains no stop string, so one ends in the new text or there is none.
        for end in range(num_held + 1, len(text) + 1):
            if text.endswith(self._stop_strings, 0, end):
                return self._stop(text)
        # What is held back is the longest suffix that a stop string starts with. It starts where the previous one
        # did or later.
        start = max(0, len(text) - self._max_held)
        while start < len(text) and not self._may_start(text[start:]):
            start += 1
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """The text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str) -> str:
        """End `text` at the earliest stop string; of two that start there, at the first in the list."""
        matches = [(text.find(stop), i) for i, stop in enumerate(self._stop_strings)]
        position, number = min(match for match in matches if match[0] >= 0)
        self.found = self._stop_strings[number]
        self._held = ""
        return text[: position + len(self.found)] if self._include_in_output else text[:position]

    def _may_start(self, suffix: str) -> bool:
        """Whether a stop string starts with `suffix`: the first that is not before it in order does, if any does."""
        i = bisect_left(self._sorted, suffix)
        return i < len(self._sorted) and self._sorted[i].startswith(suffix)
