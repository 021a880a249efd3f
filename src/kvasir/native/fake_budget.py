"""The fake core's budget for thinking: counts tokens between two markers and writes the end when they are spent.

Owns one sequence's state of thinking. As in the real core a lazy grammar sleeps while it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable


class ReasoningBudget:
    """Idle until the start marker comes, then counting, then forcing the end, then idle again."""

    def __init__(
        self, start: list[int], ends: list[list[int]], forced: list[int], n_tokens: int, prefill: Iterable[int]
    ) -> None:
        self._start, self._ends, self._forced = start, ends, forced or ends[0]
        self._n_tokens = n_tokens
        self._seen: list[int] = []
        self._left: int | None = None  # None: not thinking; below 0: no limit
        self._n_forced: int | None = None
        for token in prefill:
            self.accept(token)

    @property
    def thinking(self) -> bool:
        """Whether the tokens are thought, and no reply yet."""
        return self._left is not None or self._n_forced is not None

    @property
    def forced(self) -> int | None:
        """The token that must come next; None where the model is free."""
        return None if self._n_forced is None else self._forced[self._n_forced]

    def accept(self, token: int) -> None:
        """Note a token that was generated."""
        self._seen.append(token)
        if self._n_forced is not None:
            self._n_forced = self._n_forced + 1 if self._n_forced + 1 < len(self._forced) else None
        elif self._left is None:
            if self._ends_in(self._start):
                self._begin()
        elif any(self._ends_in(end) for end in self._ends):
            self._left = None
        else:
            self._left -= 1
            if self._left == 0:
                self._left, self._n_forced = None, 0

    def _begin(self) -> None:
        self._left, self._n_forced = (self._n_tokens, None) if self._n_tokens else (None, 0)

    def _ends_in(self, marker: list[int]) -> bool:
        return bool(marker) and self._seen[-len(marker) :] == marker
