"""What the contract tests hold: one core, fake or real, with a model of each kind, and short ways to use it.

Equality is asked for to the last bit (`same`). On the real core that needs one thread and values of type BF16: then
the attention of llama.cpp's CPU backend depends on the visible cells and their order alone, not on where they lie.
Where a test changes that order, it asks for `close`: rounding moves logits by about 1e-5, a wrong token by about 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

KINDS = ("plain", "window", "recurrent", "hybrid")
PROBE = 120  # the letter x: the token whose logits two memories are compared by


@dataclass
class Core:
    """A core and the paths of its models: plain, window, recurrent, hybrid, embed, rank and an adapter "lora"."""

    name: str
    native: ModuleType
    paths: dict[str, str]
    _models: dict[str, Any] = field(default_factory=dict)

    @property
    def is_fake(self) -> bool:
        return self.name == "fake"

    def model(self, kind: str = "plain") -> Any:
        """Return the model of this kind, loaded once."""
        if kind not in self._models:
            self._models[kind] = self.native.Model.load(self.paths[kind])
        return self._models[kind]

    def context(self, kind: str = "plain", **options: Any) -> Any:
        exact = {"n_ctx": 1024, "n_seq_max": 4, "threads": 1, "type_k": "f16", "type_v": "bf16"}
        return self.native.Context(self.model(kind), **(exact | options))

    def tokens(self, text: str) -> list[int]:
        tokens: list[int] = self.model().vocab.tokenize(text, add_special=False)
        return tokens

    def row(self, seq: int, pos: int, tokens: list[int], **options: Any) -> Any:
        return self.native.Row(seq, pos, tokens, **options)

    def params(self, **values: Any) -> Any:
        params = self.native.SamplerParams()
        for name, value in values.items():
            setattr(params, name, value)
        return params

    def sampler(self, **values: Any) -> Any:
        """Return a sampler for the plain model; greedy unless told otherwise."""
        return self.native.Sampler(self.model().vocab, self.params(**({"temperature": 0.0} | values)))

    def feed(self, context: Any, seq: int, tokens: list[int], *, chunk: int = 32) -> None:
        """Decode tokens at the end of a sequence, in chunks of a fixed size."""
        for at in range(0, len(tokens), chunk):
            end = context.memory.pos_max(seq)
            part = tokens[at : at + chunk]
            step = context.step([self.row(seq, 0 if end is None else end + 1, part)])
            assert step.status == "ok"

    def probe(self, context: Any, seq: int) -> Logits:
        """Decode one more token of this sequence and return the logits after it."""
        pos = context.memory.pos_max(seq)
        step = context.step([self.row(seq, 0 if pos is None else pos + 1, [PROBE], output=True)])
        assert step.status == "ok"
        logits: Logits = context.logits(0)
        return logits

    def fresh(self, kind: str, tokens: list[int], **options: Any) -> Logits:
        """Return what a context that saw these tokens and nothing else says next."""
        context = self.context(kind, **options)
        self.feed(context, 0, tokens)
        return self.probe(context, 0)

    def generate(self, context: Any, seq: int, tokens: list[int], sampler: Any, n: int) -> list[int]:
        """Feed tokens and sample `n` more."""
        made: list[int] = []
        pos = 0
        for _ in range(n):
            step = context.step([self.row(seq, pos, tokens, sampler=sampler)])
            assert step.status == "ok"
            pos += len(tokens)
            tokens = [step.tokens[0]]
            made += tokens
        return made


def some_tokens(n: int) -> list[int]:
    """Return `n` tokens without a pattern that a cache could hit by chance."""
    return [97 + (7 * i * i + 3 * i) % 26 for i in range(n)]


def same(a: Logits, b: Logits) -> bool:
    return bool(np.array_equal(a, b))


def close(a: Logits, b: Logits) -> bool:
    return bool(np.allclose(a, b, atol=1e-3))
