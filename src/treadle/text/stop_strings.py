"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopStringMatcher:
    """Holds back text that may be the start of a stop string, and finds the first stop string.

    Args:
        stop_strings: non-empty strings.
        include_in_output: include the stop string in the text.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
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
        text = self._held + text
        # The earliest match; of two at the same position, the first in the list.
        matches = [(text.find(stop), i) for i, stop in enumerate(self._stop_strings)]
        first = min((match for match in matches if match[0] >= 0), default=None)
        if first is not None:
            position, number = first
            self.found = self._stop_strings[number]
            self._held = ""
            return text[: position + len(self.found)] if self._include_in_output else text[:position]
        held = max((self._overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
