"""Stop strings: where a text that arrives in pieces ends.

Owns the one rule: the text ends where, reading character by character, the first stop string is complete; of
several complete at that character the longest counts. So the answer never depends on how the text was cut into
tokens. Holds back only what may still become a stop, and never shows part of one. Pure: text in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string; `matched` is that string once it came."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return what is now certain to be shown."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        hit = self._first_hit(text)
        if hit is not None:
            start, self.matched = hit
            self._held = ""
            return text[:start]
        keep = self._n_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: the text has ended, so it is no stop."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)  # the earliest end; then the earliest start, which is the longest stop
        return start, stop

    def _n_undecided(self, text: str) -> int:
        """The length of the longest end of the text that is the beginning of a stop."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
