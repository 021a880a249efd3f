"""The values the cache speaks in: rows, parts, reasons, needs and why a search found no more.

Only values: no lock, no file, no decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from kvasir.cache.key import Key


class Part(StrEnum):
    """What a row may hold of its span; parts are read and checked one by one."""

    BASE = "base"  # KV of the span in the layers that see everything: needed from every row of a chain
    WINDOW = "window"  # KV of the span in sliding-window layers: needed only near the end
    STATE = "state"  # recurrent state after the span: needed only from the last row
    LOGITS = "logits"  # what the model says after the span: alone, in rows of `Space.outputs`


class Reason(StrEnum):
    """Why a row was saved."""

    COLD = "cold"  # after prefill
    CONTINUED = "continued"  # while generating
    FINISH = "finish"  # a request ended
    EVICT = "evict"  # memory pressure or preemption
    SHUTDOWN = "shutdown"  # the engine stops


class Why(StrEnum):
    """Why a search did not find more."""

    ABSENT = "absent"  # nobody saved what follows
    DIFFERS = "differs"  # something else was saved there; `Miss.token` is the first position that differs
    SCOPE = "scope"  # another space has it: for the operator's eyes, never for a tenant's
    TOO_SHORT = "too_short"  # what is there reaches beyond what was asked for, or the prompt is below min_tokens
    SLOWER = "slower"  # reading would take longer than computing
    CORRUPT = "corrupt"  # it was there and did not verify
    NEEDS = "needs"  # rows are there, but without the window or state a restore at that point needs


class Needs(NamedTuple):
    """What a restore of this kind of model needs.

    Plain attention: the default. Sliding window: `window_tokens` of the last rows' window parts. Hybrid: `state` too.
    Recurrent: `chain=False, state=True`, any row alone restores its prefix. `trim`: the engine can drop the end of an
    imported row (plain attention can), so the last row may go beyond `Match.n_tokens`, and a row that shares only its
    beginning with the prompt is of use.
    """

    chain: bool = True
    window_tokens: int = 0
    state: bool = False
    trim: bool = False


class Miss(NamedTuple):
    """Why a match is no longer than it is."""

    why: Why
    n_wanted: int
    n_found: int
    token: int | None = None


class RowName(NamedTuple):
    """What a row is called: its space, keys and span. A file's path says exactly this, so no header need be read."""

    space: Key  # the space's root key
    key: Key  # of the prefix [0, end)
    parent: Key  # of the prefix [0, start)
    start: int
    end: int

    @classmethod
    def of_logits(cls, space: Key, key: Key, end: int) -> RowName:
        """What the logits after a prefix are called, in a space of outputs: the span is the token they follow."""
        return cls(space, key, space, end - 1, end)

    @property
    def is_logits(self) -> bool:
        """Whether the row holds logits: it follows nothing, though it does not start at 0."""
        return self.start > 0 and self.parent == self.space

    @property
    def n_tokens(self) -> int:
        """Tokens of the span."""
        return self.end - self.start


class Row(NamedTuple):
    """One stored span, as a caller sees it; a snapshot, not a handle."""

    name: RowName
    tier: str  # the fastest tier that has it
    tiers: tuple[str, ...]
    n_bytes: int  # of its largest copy
    parts: Mapping[str, int] | None  # sizes by name; None until its header has been read
    tokens: bytes | None  # the span, packed; None until its header has been read
    hits: int
    last_used: float
    reason: str | None
    leases: int

    @property
    def key(self) -> Key:
        """Key of the prefix that ends with this row."""
        return self.name.key

    @property
    def parent(self) -> Key:
        """Key of the prefix before this row."""
        return self.name.parent

    @property
    def start(self) -> int:
        """First token's position."""
        return self.name.start

    @property
    def end(self) -> int:
        """One past the last token's position."""
        return self.name.end
