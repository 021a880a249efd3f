"""Four models at once in one process, one cache, one cap of writers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvasir
from kvasir.config import load_settings
from tests.cache_real.conftest import KINDS
from tests.cache_real.rig import SMALL_BLOCKS, Place, Running, running
from tests.unit.engine.rig import prompt

# A few rows: far less than four engines offer at once.
CAP = 64 << 10


@pytest.fixture
def paths(request: pytest.FixtureRequest) -> list[Path]:
    return [request.getfixturevalue(f"tiny_{kind}") for kind in KINDS]


def converse(engine: Running, n_turns: int = 4) -> list[list[int]]:
    """Two conversations, turn by turn, in turns; what was said is compared by the caller."""
    said = []
    tokens = [prompt(100 + 30 * i, salt=i) for i in range(2)]
    for turn in range(n_turns):
        for i in range(2):
            made, _ = engine.ask(tokens[i], max_tokens=8)
            said.append(made)
            tokens[i] = (*tokens[i], *made, *prompt(25, salt=10 * turn + i))
    return said


def test_four_models_under_one_cap_of_writers(place: Place, paths: list[Path]) -> None:
    settings = load_settings(SMALL_BLOCKS | {"cache_ram_bytes": 0})
    seen: list[int] = []
    before = set(threading.enumerate())
    stop = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        cache = stack.enter_context(place.cache(settings, writer_threads=1, writer_queue_bytes=CAP))
        engines = [stack.enter_context(running(path, place=place, cache=cache, slots=2)) for path in paths]

        def watch() -> None:
            while not stop.wait(0.001):
                seen.append(cache.stats().queued_bytes)

        watcher = pool.submit(watch)
        answers = list(pool.map(converse, engines))
        for engine in engines:
            engine.settle()
        again = list(pool.map(converse, engines))  # from whatever was kept, and what was not is computed
        stop.set()
        watcher.result()
        stats = cache.stats()
        writers = [each for each in threading.enumerate() if each not in before and "cache-writer" in each.name]
        assert len(writers) == 1
        assert cache.verify().bad == ()
    assert answers == again
    assert 0 < max(seen) <= CAP
    assert stats.saves_cold > 0
    assert stats.saves_finish > 0
    for path, said in zip(paths, answers, strict=True):
        with running(path, slots=2) as plain:
            assert converse(plain) == said


def test_four_models_of_the_python_api_in_one_folder(tmp_path: Path, paths: list[Path]) -> None:
    """As users have it: each model opens the cache by itself, and all share the folder."""
    tokens = prompt(600, salt=3)
    options: dict[str, Any] = {"cache_dir": tmp_path, "threads": 1, "context_size": 1024, "slots": 2}

    def answer(model: kvasir.Model) -> tuple[tuple[int, ...], int]:
        done = model.generate(tokens, temperature=0, max_tokens=8, ignore_eos=True)
        return tuple(done.tokens), done.usage.cached_tokens

    rounds = []
    for _ in range(2):
        with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            models = [stack.enter_context(kvasir.load(path, **options)) for path in paths]
            rounds.append(list(pool.map(answer, models)))
    first, second = rounds
    assert [said for said, _ in first] == [said for said, _ in second]
    assert len({said for said, _ in first}) == len(paths)
    assert all(n_cached == 0 for _, n_cached in first)
    assert all(n_cached >= 512 for _, n_cached in second)
