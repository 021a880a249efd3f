"""Rules are each model's own, also where several models share one cache; on the fake core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.cache import Cache, SaveRules
from kvasir.config import load_settings
from kvasir.native import fake
from kvasir.service.runtime import Runtime
from tests.unit.engine.rig import prompt
from tests.unit.engine.test_warm import BLOCK, ask, rig_of, settings

SHORT = list(range(1, 18))


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime, and a fake model that is a file, as only files are cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    Path("fake:plain").write_text("plain")
    with Runtime(cache_dir=tmp_path / "kv") as opened:
        yield opened


def n_cached(runtime: Runtime, name: str, **rules: int) -> int:
    """How much of a short prompt a model that was opened for it alone finds."""
    model = runtime.open(Path("fake:plain"), load_settings({"context_size": 512, **rules}), id=name, core=fake)
    done = model.generate(SHORT, max_tokens=1, ignore_eos=True)
    runtime.unload(name)
    return done.usage.cached_tokens


def test_a_short_prompt_is_looked_for_by_the_model_that_wants_it(runtime: Runtime) -> None:
    eager = {"min_tokens": 8, "cold_min_tokens": 8}
    assert n_cached(runtime, "eager", **eager) == 0
    assert runtime.cache.stats().tiers["ram"].rows == 1
    assert n_cached(runtime, "plain") == 0, "16 tokens are too few for the default, though the row is there"
    assert n_cached(runtime, "eager", **eager) == 16
    assert runtime.cache.stats().misses_by_reason == {"absent": 1, "too_short": 1}


def test_how_long_a_request_waits_for_a_save_is_its_models_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    with Cache.open(settings(tmp_path)) as cache:
        monkeypatch.setattr(cache._store.tickets, "wait", lambda _, timeout_s: waited.append(timeout_s))
        for wait_ms in (0, 7000):
            rig = rig_of(cache, rules=SaveRules(session_resume_wait_ms=wait_ms))
            ask(rig, prompt(40, salt=3), parent_key=bytes(32))
    assert waited == [0.0, 7.0]


def test_a_generating_request_is_saved_block_by_block(tmp_path: Path) -> None:
    tokens = prompt(20, salt=5)
    with Cache.open(settings(tmp_path)) as cache:
        rig = rig_of(cache)
        sink = rig.submit(tokens, max_tokens=60, stop_tokens=frozenset())
        while len(sink.tokens) < 40:
            rig.tick()
        stats = cache.stats()
        assert (stats.saves_cold, stats.saves_continued, stats.saves_finish) == (1, 2, 0)
        ends = sorted(row.end for row in cache.ls())
        assert ends == [BLOCK, 2 * BLOCK, 3 * BLOCK]
        assert [row.reason for row in sorted(cache.ls(), key=lambda row: row.end)] == ["cold", "continued", "continued"]
        rig.drain()
        assert cache.stats().saves_continued == 3
        assert cache.stats().saves_finish == 1
