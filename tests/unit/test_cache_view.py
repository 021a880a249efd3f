"""`model.cache` on the fake core: what it tells, what it does, and what it refuses."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir import errors
from kvasir.config import load_settings
from kvasir.native import fake
from kvasir.service import cache_view
from kvasir.service.model import Model

PROMPT = "Once upon a time there was a king who had three daughters and no crown at all. " * 4
OTHER = PROMPT[:100] + "But that was long ago, and nobody remembers what came of it in the end. " * 3


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with fake models that are files, as only files are cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVASIR_CACHE_DIR", str(tmp_path / "kv"))
    for kind in ("plain", "window", "recurrent", "hybrid", "embed"):
        Path(f"fake:{kind}").write_text(kind)


def open_fake(kind: str = "plain", **options: Any) -> Model:
    settings = load_settings({"block_tokens": 64, "context_size": 1024, **options})
    return Model.open(Path(f"fake:{kind}"), settings, core=fake)


@pytest.fixture
def model() -> Iterator[Model]:
    with open_fake() as opened:
        yield opened


def row_files() -> list[Path]:
    return sorted(Path("kv").rglob("*.row"))


@pytest.mark.parametrize("kind", ["plain", "window", "recurrent", "hybrid"])
def test_a_warmed_prompt_is_there_for_the_next_process(kind: str) -> None:
    with open_fake(kind) as model:
        first = model.cache.warm(PROMPT)
        assert (first.tokens, first.cached_tokens) == (len(model.tokenize(PROMPT)), 0)
    assert not first.was_there
    assert first.path is not None
    assert Path(first.path).is_file()
    with open_fake(kind) as model:
        again = model.cache.warm(PROMPT)
        assert again.was_there
        assert again.key == first.key
        assert again.cached_tokens > 0
        longer = [*model.tokenize(PROMPT), *model.tokenize("And then", add_special=False)]
        assert model.generate(longer, max_tokens=1).usage.cached_tokens >= first.tokens - 1


def test_a_scope_is_warmed_by_itself(model: Model) -> None:
    mine = model.cache.warm(PROMPT, scope="mine")
    assert not model.cache.warm(PROMPT, scope="yours").was_there
    assert model.cache.warm(PROMPT, scope="mine").key == mine.key


def test_a_prompt_too_short_to_keep_says_so(model: Model) -> None:
    with pytest.raises(errors.BadOption, match=r"3 tokens; fewer than min_tokens \(32\)"):
        model.cache.warm("abc")


def test_without_a_disk_a_prompt_is_kept_in_memory(tmp_path: Path) -> None:
    with open_fake(cache_disk_bytes=0) as model:
        assert model.cache.warm(PROMPT).path is None
        assert model.cache.warm(PROMPT).was_there
        assert model.cache.stats(all_processes=True).tiers.keys() == {"ram"}
    assert not Path("kv").exists()


def test_stats_tell_of_this_process_and_of_all() -> None:
    for _ in range(2):
        with open_fake() as model:
            model.cache.warm(PROMPT)
    with open_fake() as model:
        own, everyone = model.cache.stats(), model.cache.stats(all_processes=True)
    assert (own.hits, own.misses) == (0, 0)
    assert own.tiers["disk"].rows == everyone.tiers["disk"].rows == len(row_files())
    assert own.bytes_disk == everyone.bytes_disk == sum(path.stat().st_size for path in row_files())
    assert (everyone.hits_exact, everyone.misses, everyone.misses_by_reason) == (1, 1, {"absent": 1})
    assert everyone.hit_ratio == 0.5
    assert everyone.saves_cold + everyone.saves_finish == len(row_files())


def test_a_process_that_runs_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_view, "NOTE_S", 0.02)
    with open_fake() as busy, open_fake() as model:
        busy.cache.warm(PROMPT)
        deadline = time.monotonic() + 20
        while (noted := model.cache.stats(all_processes=True)).tiers["ram"].rows == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert noted.misses == 1
        assert (model.cache.stats().misses, model.cache.stats().tiers["ram"].rows) == (0, 0)


def test_ls_is_a_tree_and_knows_the_hits_of_processes_that_ended() -> None:
    for prompt in (PROMPT, OTHER, PROMPT):
        with open_fake() as model:
            model.cache.warm(prompt)
    with open_fake() as model:
        rows = model.cache.ls()
    keys = [row.key for row in rows]
    assert all(row.parent in keys[:at] or row.depth == 0 for at, row in enumerate(rows))
    shared = [row for row in rows if row.end <= 64]
    assert [row.hits for row in shared] == [2]
    assert {row.hits for row in rows} == {0, 1, 2}
    assert {row.tier for row in rows} == {"disk"}
    assert {row.status for row in rows} == {"available"}
    assert {Path(str(row.path)) for row in rows} == {path.absolute() for path in row_files()}


def test_a_damaged_row_is_found_removed_and_counted() -> None:
    with open_fake() as model:
        model.cache.warm(PROMPT)
    bad = row_files()[0]
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    seen: list[tuple[int, int]] = []
    with open_fake() as model:
        n_rows = len(model.cache.ls())
        found = model.cache.verify(lambda done, total: seen.append((done, total)))
        assert len(found.bad) == 1
        assert found.rows == n_rows
        assert model.cache.verify().bad == ()
        assert model.cache.warm(PROMPT).path is not None
    assert seen == [(at, n_rows) for at in range(1, n_rows + 1)]
    with open_fake() as model:
        assert model.cache.stats(all_processes=True).corrupt_files == 1
        assert model.cache.warm(PROMPT).was_there


def test_prune_goes_down_to_bytes_and_by_age(model: Model) -> None:
    model.cache.warm(PROMPT)
    before = model.cache.stats().bytes_disk
    assert model.cache.prune(older_than_s=3600) == 0
    freed = model.cache.prune(to_bytes=before // 2)
    assert freed > 0
    assert model.cache.stats().bytes_disk <= before // 2
    assert sum(path.stat().st_size for path in row_files()) == model.cache.stats().bytes_disk
    model.close()
    for path in row_files():
        os.utime(path, (1, 1))
    with open_fake() as again:
        assert again.cache.prune(older_than_s=60) > 0
    assert row_files() == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs to_bytes or older_than_s"),
        ({"to_bytes": -1}, "to_bytes must be 0 or more"),
        ({"older_than_s": float("nan")}, "older_than_s must be 0 or more"),
    ],
)
def test_prune_refuses_what_makes_no_sense(model: Model, options: Any, says: str) -> None:
    with pytest.raises(errors.BadOption, match=says):
        model.cache.prune(**options)


def test_clear_empties_every_tier_and_the_model_goes_on(model: Model) -> None:
    model.cache.warm(PROMPT)
    assert model.cache.clear() > 0
    assert model.cache.ls() == []
    assert row_files() == []
    assert model.generate(OTHER, max_tokens=2, ignore_eos=True).tokens


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("plain", {"cache": False}, "cache=False"),
        ("plain", {"vocab_only": True}, "vocab_only=True"),
        ("embed", {}, "encoder"),
    ],
)
def test_a_model_without_a_cache_says_why(kind: str, options: Any, why: str) -> None:
    with open_fake(kind, **options) as model, pytest.raises(errors.Unsupported, match=why):
        _ = model.cache
    assert not Path("kv").exists()


def test_a_closed_model_has_no_cache(model: Model) -> None:
    model.close()
    with pytest.raises(errors.Closed):
        _ = model.cache


def test_a_view_that_was_let_go_keeps_no_model_open() -> None:
    model = open_fake()
    model.cache.warm(PROMPT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert (Path("kv") / "stats" / "total.json").exists()


def test_closing_leaves_no_file_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with open_fake() as model:
        model.cache.warm(PROMPT)
    before = open_files()
    for _ in range(5):
        with open_fake() as model:
            model.cache.warm(PROMPT)
            model.cache.stats()
    assert open_files() <= before
