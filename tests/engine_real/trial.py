"""One model in one layout with one type of V: engines on it, and the comparison with a request that ran alone.

With V in BF16 and one thread llama.cpp's attention depends on the visible cells and their order alone, so that a fault
shows far above the noise, which for SmolLM2 is then zero. F16 is what users run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir import native
from tests.engine_real.noise import Noise, check_equal, measure
from tests.engine_real.rig import Rig, Taken
from tests.engine_real.subject import Subject

# Where noise is small, two tokens nearly never come closer than that, and of one test's runs at most one may part.
SMALL = 0.1
MOST_PARTED = 1

Check = Callable[[Taken, Taken, Noise], bool]


@dataclass
class Bench:
    """A model with one type of V, what noise that makes, and what its requests give alone."""

    subject: Subject
    type_v: str
    noise: Noise
    _alone: dict[Any, Taken] = field(default_factory=dict)

    @classmethod
    def of(cls, subject: Subject, type_v: str, **what: Any) -> Bench:
        """Measure the noise first."""
        return cls(subject, type_v, measure(subject, type_v=type_v, **what))

    def rig(self, **settings: Any) -> Rig:
        context = {"type_v": self.type_v, **settings.pop("context", {})}
        return Rig(self.subject.model, context=context, **settings)

    def alone(self, tokens: tuple[int, ...], **options: Any) -> Taken:
        """Run one request in an engine of its own, once, which is what every other way must equal."""
        key = (tokens, *sorted(options.items()))
        if key not in self._alone:
            with self.rig(slots=1) as rig:
                self._alone[key] = rig.run(tokens, **options)
        return self._alone[key]


@dataclass(frozen=True)
class Trial:
    """A bench and a layout."""

    bench: Bench
    layout: str

    @property
    def subject(self) -> Subject:
        return self.bench.subject

    @property
    def model(self) -> native.Model:
        return self.subject.model

    def rig(self, **settings: Any) -> Rig:
        return self.bench.rig(layout=self.layout, **settings)

    def check(
        self,
        sinks: Sequence[Taken],
        prompts: Sequence[tuple[int, ...]],
        *,
        how: Check = check_equal,
        holes: bool = False,
        **options: Any,
    ) -> None:
        """Compare each run with the same request alone. `holes`: others gave back cells that these runs then used."""
        noise = self.bench.noise if holes and self.layout == "unified" else self.bench.noise.in_order
        parted = 0
        for sink, tokens in zip(sinks, prompts, strict=True):
            parted += how(sink, self.bench.alone(tokens, max_tokens=len(sink.tokens), **options), noise)
        assert parted <= MOST_PARTED or noise.largest > SMALL
