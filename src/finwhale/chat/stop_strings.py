"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopChecker:
    """Cuts a stream of text at the first stop string.

    The first stop string is the one that is complete first; if several are complete at the same
    character, the longest of them. The result therefore does not depend on how the text is split.
    The checker holds back text that may be the start of a stop string. A character costs about one
    comparison for each stop string (Knuth, Morris and Pratt 1977).

    Attributes:
        matched: the stop string that was found; None: none yet.
    """

    def __init__(self, stop: Sequence[str], *, keep: bool = False) -> None:
        """
        Args:
            stop: non-empty strings; if there are none, all text passes through.
            keep: the text ends after the stop string, not before it.
        """
        assert all(stop), "an empty stop string"
        self._keep = keep
        self.matched: str | None = None
        self._stop = tuple(dict.fromkeys(stop))
        self._firsts = frozenset(s[0] for s in self._stop)
        self._borders = [_borders(s) for s in self._stop]
        self._lengths = [0] * len(self._stop)  # characters of each string that are matched now
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; returns the text that is certainly part of the output, "" after a match."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            found = self._advance(text[end])
            if found is not None:
                self.matched, self._held = found, ""
                return text[: end + 1 if self._keep else end + 1 - len(found)]
        safe = len(text) - max(self._lengths)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """End the text; returns the held-back text, since no stop string can follow."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stop)
        return held

    def _advance(self, char: str) -> str | None:
        """Add a character; returns the longest stop string that it completes."""
        found = None
        for i, stop in enumerate(self._stop):
            length = self._lengths[i]
            while length and stop[length] != char:
                length = self._borders[i][length]
            length += stop[length] == char
            if length == len(stop):
                if found is None or length > len(found):
                    found = stop
                length = self._borders[i][length]
            self._lengths[i] = length
        return found


def find_stop(text: str, stop: Sequence[str], start: int) -> tuple[int, int, str | None]:
    """Find the first stop string that ends after `start` characters of a text.

    Returns:
        Its begin, its end, and the stop string; the end of the text and None if there is none.
    """
    checker = StopChecker(stop)
    for end, char in enumerate(text, start=1):
        found = checker._advance(char)
        if found is not None and end > start:
            return end - len(found), end, found
    return len(text), len(text), None


def _borders(s: str) -> list[int]:
    """For each n: the length of the longest proper prefix of s[:n] that is also its suffix."""
    borders = [0] * (len(s) + 1)
    k = 0
    for n in range(1, len(s)):
        while k and s[n] != s[k]:
            k = borders[k]
        k += s[n] == s[k]
        borders[n + 1] = k
    return borders
