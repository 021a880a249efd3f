"""A slow disk: restores slower than computing are refused, and no stream waits for a read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvasir.cache import Why
from kvasir.engine.events import Admitted
from tests.cache_real.faulty import SlowFiles
from tests.cache_real.rig import Place, Running, running
from tests.unit.engine.rig import prompt

LONG = prompt(600, salt=2)
# The speed of a read is learned from rows of 64 KiB and more: 256 tokens of the tiny llama.
LARGE: dict[str, Any] = {"block_tokens": 256, "boundary_align_tokens": 256, "context_size": 4096}
# What one read takes; a stream's tokens come every millisecond or so, and other work on the machine may double that
# many times before it looks like this.
SLOW_S = 0.4


@dataclass
class Clock:
    """The cache's time, which a test can move on."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class SlowPlace(Place):
    """A folder whose reads can be made slow."""

    files: SlowFiles = field(default_factory=SlowFiles)
    clock: Clock = field(default_factory=Clock)


@pytest.fixture
def slow(tmp_path: Path) -> SlowPlace:
    return SlowPlace(tmp_path)


def asked_again(engine: Running) -> tuple[list[int], int]:
    """Ask when nothing of the prompt is live."""
    engine.ask(prompt(200, salt=77), cache=False)
    return engine.ask(LONG)


def test_a_slow_tier_flips_the_decision_and_back(slow: SlowPlace, tiny_llama: Path) -> None:
    with running(tiny_llama, place=slow, slots=1, **LARGE) as engine:
        wanted, _ = engine.ask(LONG)
        engine.settle()
    with running(tiny_llama, place=slow, slots=1, **LARGE) as engine:
        assert engine.cache is not None
        assert engine.ask(prompt(600, salt=3))[1] == 0  # now it is known what computing costs
        slow.files.seconds = SLOW_S
        first, n_first = asked_again(engine)  # nothing is known of this disk yet, so it is tried
        refused, n_refused = asked_again(engine)
        stats = engine.cache.stats()
        assert n_first == len(LONG)
        assert n_refused < 256
        assert stats.refused_slower > 0
        assert stats.misses_by_reason.get(Why.SLOWER, 0) + stats.short_by_reason.get(Why.SLOWER, 0) > 0
        slow.files.seconds = 0.0
        slow.clock.ahead += 60.0  # figures that nobody renewed are forgotten: a disk that recovered is tried again
        third, n_third = asked_again(engine)
        fourth, n_fourth = asked_again(engine)
        assert n_third == n_fourth == len(LONG)
    assert first == refused == third == fourth == wanted


@pytest.mark.parametrize("n_others", [0, 1])
def test_no_stream_waits_for_a_read(slow: SlowPlace, path: Path, n_others: int) -> None:
    """While the rows of one prompt are read, slowly, another's tokens come as before.

    `n_others` more prompts that part from it are on disk, so that a search has something to compare.
    """
    with running(path, place=slow, slots=2, **LARGE) as engine:
        wanted, _ = engine.ask(LONG)
        for i in range(n_others):
            engine.ask(LONG[:560] + prompt(60, salt=40 + i))
        engine.settle()
    with running(path, place=slow, slots=2, **LARGE) as engine:
        stream = engine.submit(prompt(20, salt=5), max_tokens=2000, cache=False)
        stream.wait_for(20)
        slow.files.seconds = SLOW_S
        since = time.perf_counter()
        late = engine.submit(LONG)
        done = late.done()
        until = time.perf_counter()
        slow.files.seconds = 0.0
        assert slow.files.n_slow >= 2
        assert done.usage.cached_tokens >= 512
        assert late.tokens == wanted
        assert until - since > SLOW_S
        gaps = stream.gaps(since, until)
        assert len(gaps) > 20
        assert max(gaps) < SLOW_S / 2, f"{len(gaps)} tokens came meanwhile; the longest gap was {max(gaps):.3f} s"
        (admitted,) = [each for each in engine.events if isinstance(each, Admitted) and each.n_reused]
        assert admitted.source == "stored"
