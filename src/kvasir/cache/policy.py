"""What to save, and what to give up first. Pure: values in, values out; no clock, lock, file or counter.

`SaveRules` keeps erllama's names. Where blocks change what a name costs, the default changes with it and says why.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from kvasir.errors import BadOption

# A hit is worth half after six hours without another (ds4's figure). The half-life only sets the exchange rate between
# recency, hits and density, so it need not be exact.
HALF_LIFE_S = 6 * 3600.0


class SaveRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a model's prefixes are worth a save.

    min_tokens: shorter prefixes are neither saved nor searched for. 32, not erllama's 512: a row costs its own span
        only. An estimate, not a measurement: 32 tokens of SmolLM2 are 0.7 MB to read and some 200 ms to compute.
    cold_min_tokens, cold_max_tokens: prompts outside are not saved after prefill; past the maximum, the part below it
        is. No practical maximum by default, because a long prompt costs no more per token than a short one here.
    continued_interval: new tokens between saves while generating: one block, as that is the unit written.
    boundary_trim_tokens, boundary_align_tokens: a cold save ends at the last multiple of `align` that leaves `trim`
        tokens out, because the end of a prompt is what a next one re-tokenises otherwise. With align = a block, cold
        saves make no tails.
    session_resume_wait_ms: how long a search waits for a save in flight that its `parent_key` names.
    """

    min_tokens: int = 32
    cold_min_tokens: int = 32
    cold_max_tokens: int = 1 << 30
    continued_interval: int = 256
    boundary_trim_tokens: int = 32
    boundary_align_tokens: int = 256
    session_resume_wait_ms: int = 500

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 1 if name in ("continued_interval", "boundary_align_tokens") else 0
            _at_least(name, getattr(self, name), least)
        _at_least("cold_min_tokens", self.cold_min_tokens, self.min_tokens, "min_tokens")
        _at_least("cold_max_tokens", self.cold_max_tokens, self.cold_min_tokens, "cold_min_tokens")


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    start: int
    end: int


def cold_end(n_prompt: int, rules: SaveRules) -> int:
    """How far a prompt is saved after its prefill; 0: not at all."""
    if n_prompt < max(rules.cold_min_tokens, rules.min_tokens):
        return 0
    within = min(n_prompt - rules.boundary_trim_tokens, rules.cold_max_tokens)
    end = max(0, within) // rules.boundary_align_tokens * rules.boundary_align_tokens
    return end if end >= rules.min_tokens else 0


def continued_end(n_live: int, n_saved: int, rules: SaveRules, *, block_tokens: int) -> int:
    """How far a generating sequence is saved now: its full blocks, once `continued_interval` tokens are new; else 0."""
    end = n_live // block_tokens * block_tokens
    due = n_live - n_saved >= rules.continued_interval and end > n_saved and end >= rules.min_tokens
    return end if due else 0


def last_end(n_live: int, n_saved: int, rules: SaveRules) -> int:
    """How far a sequence is saved when it finishes, is evicted or is shut down: all of it, or 0."""
    return n_live if n_live > n_saved and n_live >= rules.min_tokens else 0


def spans(n_saved: int, end: int, block_tokens: int) -> list[Span]:
    """The rows that take a sequence from `n_saved` to `end`: full blocks, then the tail.

    Begins at the block boundary at or below `n_saved`, so a tail that grew is written again as what it became.
    """
    first = n_saved // block_tokens * block_tokens
    return [Span(at, min(at + block_tokens, end)) for at in range(first, end, block_tokens)]


def worth(*, last_used: float, hits: int, n_tokens: int, n_bytes: int) -> float:
    """A row's standing against others of its tier: lowest goes first.

    The logarithm of (hits + 1) * 2^(-age / half-life) * tokens / bytes, without the term in `now` that all rows share:
    so a standing does not change while nobody touches the row, and rows can be kept in order.
    """
    density = math.log2(max(1, n_tokens) / max(1, n_bytes))
    return last_used / HALF_LIFE_S + math.log2(hits + 1) + density


def room_needed(*, used: int, incoming: int, quota: int) -> int | None:
    """Bytes to free before `incoming` fits, or None when it never can."""
    return None if incoming > quota else max(0, used + incoming - quota)


def pressure_target(*, used: int, total: int, high: float, low: float) -> int:
    """Bytes to give up under memory pressure: down to the low watermark, once above the high one."""
    return max(0, int(used - low * total)) if total > 0 and used > high * total else 0


def _at_least(name: str, value: object, least: int, of: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        named = f"{of} ({least:,})" if of else f"{least:,}"
        raise BadOption(f"{name} must be a whole number, at least {named}, got {value!r}.")
