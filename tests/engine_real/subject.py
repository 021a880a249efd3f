"""What the tests run on: a real model with prompts that mean something to it.

Random letters are as good as any text to a model of random weights. A trained one gets sentences, in an order that the
salt decides: on noise its logits are flat, and two runs that differ by a rounding would part everywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from kvasir import native
from tests.unit.engine.rig import prompt as letters

SENTENCES = (
    "The old ship left the harbour in the morning, and nobody on board knew where the captain wanted to go. ",
    "A river that rises in the mountains carries sand to the sea. ",
    "Water boils at one hundred degrees, unless the kettle stands on a high mountain. ",
    "She counted the coins twice, put them back into the box and locked it. ",
    "Paris is the capital of France, and Rome is the capital of Italy. ",
    "Bees collect nectar from flowers and turn it into honey. ",
    "In winter the days are short; in summer they are long. ",
    "The committee met on Monday, on Tuesday and again on Friday, and agreed on nothing. ",
    "To make bread you need flour, water, salt and time. ",
    "The train to the coast leaves at seven and arrives before noon. ",
)


@dataclass
class Subject:
    """A model, loaded once, and how to speak to it."""

    name: str
    path: Path
    model: native.Model = field(init=False)

    def __post_init__(self) -> None:
        self.model = native.Model.load(str(self.path))

    @property
    def is_tiny(self) -> bool:
        return self.name != "real"

    def prompt(self, n_tokens: int, *, salt: int = 0) -> tuple[int, ...]:
        """Return a prompt of exactly this many tokens; another salt gives one that parts from it early."""
        if self.is_tiny:
            return letters(n_tokens, salt=salt)
        dice = random.Random(salt)
        text = ""
        tokens: list[int] = []
        while len(tokens) < n_tokens:
            text += dice.choice(SENTENCES)
            tokens = self.model.vocab.tokenize(text, add_special=True)
        return tuple(tokens[:n_tokens])

    def own(self, i: int, n_tokens: int = 24) -> tuple[int, ...]:
        """Return a continuation that differs from all others at its first token."""
        first = self.model.vocab.tokenize(chr(97 + i), add_special=False)[0]
        return (first, *self.prompt(n_tokens - 1, salt=40 + i))
