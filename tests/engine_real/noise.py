"""What llama.cpp's own rounding is worth, and what "equal" means because of it.

The CPU kernels round differently when the same tokens come in other batch shapes or lie in other cells: matrix
products of one row and of many, attention over one chunk of cells or several, values summed in F16. `measure` plays
the shapes an engine makes on a bare context, without any of our code above it, and tells how far a logit moves. Two
runs are then equal when no logit moved much more than that, and they chose the same tokens, unless at the first
difference the two candidates were closer together than rounding can push them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir import native
from tests.engine_real.rig import Logits, Taken, sampler
from tests.engine_real.subject import Subject

N_FOLLOW = 16
# Lengths and salts of the prompts that noise is measured on: below and above 64 rows, where attention goes another way.
PROMPTS = ((20, 1), (100, 3), (200, 5), (20, 4), (100, 2))
OUT_OF_ORDER = "out of order"
# What is done differently from one prompt in one batch, alone in its context; the arguments of `Plain.run`.
SHAPES: dict[str, dict[str, Any]] = {
    "chunks of 1": {"chunk": 1},
    "chunks of 7": {"chunk": 7},
    "chunks of 64": {"chunk": 64},
    "other cells": {"seq": 1, "behind": 1, "n_behind": 100},
    "far cells": {"seq": 1, "behind": 1, "n_behind": 700},
    OUT_OF_ORDER: {"hole": 12},
    "among 7": {"seq": 3, "behind": 7, "n_behind": 20, "beside": True},
    "among 7, split": {"seq": 3, "behind": 7, "n_behind": 20, "beside": True, "unified": False},
    "split": {"unified": False},
}
# A run under test meets more shapes than were measured, and what the KV of a token is off by goes into all later ones.
SLACK = 3.0


@dataclass(frozen=True)
class Noise:
    """How far any logit moved between plain runs of the same tokens."""

    by_shape: dict[str, float]

    @property
    def largest(self) -> float:
        """Of all shapes."""
        return max(self.by_shape.values())

    @property
    def in_order(self) -> Noise:
        """The noise of runs whose cells lie in the order of their tokens.

        Attention sums in the order of cells. Where preemption or eviction makes holes that later tokens fill, that
        order changes; nowhere else. With V in BF16 it is all the noise that SmolLM2 has: 0.99, against 0.
        """
        return Noise({name: moved for name, moved in self.by_shape.items() if name != OUT_OF_ORDER})

    @property
    def allowed(self) -> float:
        """How far a logit may have moved in a run that counts as equal."""
        return SLACK * self.largest


def measure(
    subject: Subject,
    prompts: list[tuple[int, ...]] | None = None,
    *,
    n_follow: int = N_FOLLOW,
    shapes: Iterable[str] = SHAPES,
    **context: Any,
) -> Noise:
    """Decode the same tokens in many shapes and compare all logits with those of the simplest."""
    moved = dict.fromkeys([*shapes, "read back"], 0.0)
    for prompt in prompts or [subject.prompt(n_tokens, salt=salt) for n_tokens, salt in PROMPTS]:
        plain = Plain(subject, prompt, n_follow, context)
        usual = plain.run()
        found = {name: plain.run(**SHAPES[name]) for name in shapes}
        found["read back"] = [*usual[:-1], plain.read_back()]
        for name, logits in found.items():
            moved[name] = max(moved[name], largest_move(usual, logits))
    return Noise(moved)


class Plain:
    """The same tokens on bare contexts: a prompt, then tokens one at a time, as a stream makes them."""

    def __init__(self, subject: Subject, prompt: tuple[int, ...], n_follow: int, options: dict[str, Any]) -> None:
        self._subject = subject
        self._options = {"n_ctx": 2048, "n_seq_max": 8, "threads": 1, "threads_batch": 1} | options
        self._prompt = list(prompt)
        self._follow = self._greedy(n_follow)

    def run(
        self, *, chunk: int = 512, seq: int = 0, behind: int = 0, n_behind: int = 0, beside: bool = False,
        unified: bool = True, hole: int = 0,
    ) -> list[Logits]:  # fmt: skip
        """Return the logits after the prompt and after every token that follows.

        `behind` other sequences of `n_behind` tokens lie in memory first; `beside`: each of them runs a row in every
        step, the first included. `hole`: that many cells before the prompt's are given back when half of it was read,
        so that the next tokens fall into them, as after a preemption.
        """
        context = native.Context(self._subject.model, kv_unified=unified, **self._options)
        others = [i for i in range(8) if i != seq][:behind]
        for i in others:
            self._feed(context, i, self._subject.prompt(n_behind, salt=60 + i), 512)
        if not beside:
            others = []
        found = []
        if hole:
            found.append(self._feed_around(context, seq, hole))
        elif chunk < len(self._prompt):
            found.append(self._feed(context, seq, tuple(self._prompt), chunk))
        for at in range(bool(found), 1 + len(self._follow)):
            tokens, pos = ([self._follow[at - 1]], len(self._prompt) + at - 1) if at else (self._prompt, 0)
            rows = [native.Row(i, n_behind + at, [self._prompt[-1]]) for i in others]
            rows.append(native.Row(seq, pos, tokens, output=True))
            rows.sort(key=lambda row: row.seq)
            assert context.step(rows).status == "ok"
            found.append(context.logits([row.seq for row in rows].index(seq)))
        context.close()
        return found

    def _feed_around(self, context: native.Context, seq: int, hole: int) -> Logits:
        half = len(self._prompt) // 2
        self._feed(context, seq + 1, self._subject.prompt(hole, salt=50), 512)
        self._feed(context, seq, tuple(self._prompt[:half]), 512)
        context.memory.remove(seq + 1, 0, None)
        assert context.step([native.Row(seq, half, self._prompt[half:], output=True)]).status == "ok"
        return context.logits(0)

    def read_back(self) -> Logits:
        """Return the logits after everything, read at once, as after a preemption."""
        context = native.Context(self._subject.model, **self._options)
        found = self._feed(context, 0, (*self._prompt, *self._follow), 512)
        context.close()
        return found

    def _feed(self, context: native.Context, seq: int, tokens: tuple[int, ...], chunk: int) -> Logits:
        for at in range(0, len(tokens), chunk):
            part = list(tokens[at : at + chunk])
            assert context.step([native.Row(seq, at, part, output=True)]).status == "ok"
        return context.logits(0)

    def _greedy(self, n_tokens: int) -> list[int]:
        context = native.Context(self._subject.model, **self._options)
        chosen = sampler(self._subject.model, tuple(self._prompt))
        made: list[int] = []
        tokens, pos = self._prompt, 0
        while len(made) < n_tokens:
            token = context.step([native.Row(0, pos, tokens, chosen)]).tokens[0]
            assert token is not None
            pos, tokens = pos + len(tokens), [token]
            made.append(token)
        context.close()
        return made


def largest_move(one: list[Logits], other: list[Logits]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def check_equal(got: Taken, wanted: Taken, noise: Noise) -> bool:
    """Fail unless the two runs are equal up to rounding; return whether they parted at a near tie."""
    n_same = check_drift(got, wanted, noise)
    mine, theirs = got.tokens, wanted.tokens
    if n_same == len(mine):
        return False
    for logits in (got.logits[n_same], wanted.logits[n_same]):
        gap = abs(float(logits[mine[n_same]] - logits[theirs[n_same]]))
        # Each of the two may have been pushed that far, against the other.
        assert gap <= 2 * noise.largest, f"token {n_same} differs, and the two were {gap:.4g} apart"
    return True


def check_drawn(got: Taken, wanted: Taken, noise: Noise) -> bool:
    """The same for drawn tokens: where they part, the draw fell on the border of two, and the logits were equal."""
    return check_drift(got, wanted, noise) < len(got.tokens)


def check_drift(got: Taken, wanted: Taken, noise: Noise) -> int:
    """Fail if a logit moved by more than noise while both runs had the same tokens; return how many those are."""
    mine, theirs = got.tokens, wanted.tokens
    assert len(mine) == len(theirs)
    n_same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
    for i in range(min(n_same + 1, len(mine))):
        moved = float(np.abs(got.logits[i] - wanted.logits[i]).max())
        assert moved <= noise.allowed, f"at token {i} a logit moved by {moved:.4g}, noise is {noise.largest:.4g}"
    return n_same


def check_bits(got: Taken, wanted: Taken) -> None:
    """Fail unless the two runs saw the same logits to the last bit."""
    assert got.tokens == wanted.tokens
    assert len(got.logits) == len(wanted.logits)
    for i, (a, b) in enumerate(zip(got.logits, wanted.logits, strict=True)):
        assert np.array_equal(a, b), f"at token {i} a logit moved by {np.abs(a - b).max():.4g}"
