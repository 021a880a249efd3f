"""Bad files and bad disks under a running engine: never served, never felt, counted, and over when they are over."""

from __future__ import annotations

import errno
import random
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cache_real.faulty import Disk, FailingFiles, small_disk
from tests.cache_real.rig import EXACT, Place, Running, alone, running
from tests.engine_real.noise import check_bits
from tests.unit.engine.rig import prompt

LONG = prompt(150, salt=2)


@pytest.mark.parametrize("n_flips", [1, 40])
def test_flipped_bits_are_never_served(place: Place, path: Path, n_flips: int) -> None:
    """Bits of every row file change while the engine that wrote them runs; it reads them back from disk alone."""
    dice = random.Random(n_flips)
    with place.opened(path, slots=1, **EXACT) as each:
        said = each.ask(LONG)
        assert each.cache.flush(30)
        rows = place.rows()
        for row in rows:
            spoil(row, dice, n_flips)
        each.ask(prompt(60, salt=9))  # what was live goes, so that the next one must come from disk
        again = each.ask(LONG)
        stats = each.cache.stats()
        assert again.done.usage.cached_tokens == 0
        assert stats.corrupt_files > 0
        later = []
        for _ in rows:  # a search meets bad rows one by one; what is computed instead is saved in their place
            each.ask(prompt(60, salt=9))
            later.append(each.ask(LONG))
        assert later[-1].done.usage.cached_tokens > 100
    check_bits(said, alone(path, LONG, **EXACT))
    for sink in (again, *later):
        check_bits(sink, said)


def test_a_bit_anywhere(place: Place, tiny_llama: Path) -> None:
    """One bit in one row, anywhere: what comes before it is used, the rest is computed."""
    dice = random.Random(5)
    wanted = alone(tiny_llama, LONG, **EXACT)
    corrupt = 0
    with place.opened(tiny_llama, slots=1, **EXACT) as each:
        each.ask(LONG)
        for _ in range(25):
            assert each.cache.flush(30)
            spoil(dice.choice(place.rows()), dice, 1)
            each.ask(prompt(12, salt=9), cache=False)
            check_bits(each.ask(LONG), wanted)
        corrupt = each.cache.stats().corrupt_files
    assert corrupt > 5


def test_rows_of_another_model_under_our_names(place: Place, tiny_llama: Path, other_llama: Path) -> None:
    """Files swapped between the rows of two models, whose KV fits the other's context perfectly."""
    for path in (tiny_llama, other_llama):
        with place.opened(path, **EXACT) as each:
            each.ask(LONG)
    spaces = [sorted(space.rglob("*.row")) for space in {row.parents[2] for row in place.rows()}]
    # Each model has a space for its KV, and one for the logits after its prompt.
    logits, logits_too, rows, rows_too = sorted(spaces, key=len)
    assert len(logits) == len(logits_too) == 1
    swapped = 0
    for mine, theirs in zip(logits + rows, logits_too + rows_too, strict=True):
        other = theirs.read_bytes()
        theirs.write_bytes(mine.read_bytes())
        mine.write_bytes(other)
        swapped += 1
    assert swapped > 3
    for path in (tiny_llama, other_llama):
        with place.opened(path, **EXACT) as each:
            sink = each.ask(LONG)
            assert each.cache.stats().corrupt_files > 0
        assert sink.done.usage.cached_tokens == 0
        check_bits(sink, alone(path, LONG, **EXACT))


def test_a_full_disk(tmp_path: Path, tiny_llama: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, engine_on(disk, tiny_llama) as engine:
        goes_on(engine, range(3))
        disk.fill()
        before = failures(engine)
        goes_on(engine, range(10, 16))
        assert failures(engine) > before
        disk.relieve()
        recovers(engine, disk)


def test_a_disk_smaller_than_its_quota(tmp_path: Path, tiny_llama: Path) -> None:
    """The quota says 10 GiB, the file system 256 KiB: rows give way to rows, and nobody else notices."""
    with small_disk(tmp_path / "disk", "256k") as disk, engine_on(disk, tiny_llama) as engine:
        assert engine.cache is not None
        before = 0
        for salts in (range(12), range(12, 16)):
            goes_on(engine, salts)
            engine.settle()
            written = engine.cache.stats().bytes_written
            assert written > before, "a full disk takes nothing new any more"
            before = written
        assert disk.files is not None or failures(engine) > 0
        assert engine.cache.verify().bad == ()
        assert Place(disk.folder).temps() == []


def test_a_disk_that_turns_read_only(place: Place, tiny_llama: Path) -> None:
    """What is there can still be had; what is new is not kept until it can be again."""
    files = FailingFiles()
    place.files = files
    disk = Disk(place.folder, files)
    with running(tiny_llama, place=place, slots=1) as engine:
        goes_on(engine, range(2))
        assert failures(engine) == 0
        files.code = errno.EROFS
        assert engine.ask(prompt(150, salt=500))[1] > 100  # from a disk that takes no writes
        goes_on(engine, range(10, 13))
        assert failures(engine) > 0
        files.code = None
        recovers(engine, disk)


def test_a_folder_that_was_always_read_only(tmp_path: Path, tiny_llama: Path) -> None:
    """An image with rows in it, mounted read-only: they are served, and nothing else is kept."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        with engine_on(disk, tiny_llama) as engine:
            goes_on(engine, range(2))
        disk.close_to_writes()
        with engine_on(disk, tiny_llama) as engine:
            assert engine.ask(prompt(150, salt=500))[1] > 100
            goes_on(engine, range(10, 12))
            assert failures(engine) > 0
        disk.relieve()
        with engine_on(disk, tiny_llama) as engine:
            recovers(engine, disk)


def test_the_folder_deleted_while_running(place: Place, path: Path) -> None:
    with running(path, place=place, slots=1) as engine:
        wanted, _ = engine.ask(LONG)
        engine.settle()
        shutil.rmtree(place.folder / "kv")
        goes_on(engine, range(3))
        again, n_cached = engine.ask(LONG)
        assert (again, n_cached) == (wanted, 0)
        engine.settle()
        heals(engine, wanted)
        assert place.rows()
        assert engine.cache is not None
        assert engine.cache.stats().vanished > 0


# What every one of these must show


def engine_on(disk: Disk, path: Path) -> AbstractContextManager[Running]:
    return running(path, place=Place(disk.folder, disk.files), slots=1)


def goes_on(engine: Running, salts: range) -> None:
    """Requests that are answered as they are without a cache."""
    for salt in salts:
        tokens = prompt(150, salt=500 + salt)
        with_cache, _ = engine.ask(tokens)
        without, n_cached = engine.ask(tokens, cache=False)
        assert n_cached == 0
        assert with_cache == without


def failures(engine: Running) -> int:
    """Saves that came to nothing, and rows given up so that others could be saved."""
    assert engine.cache is not None
    engine.settle()
    stats = engine.cache.stats()
    return stats.write_errors + stats.saves_dropped + stats.evictions


def recovers(engine: Running, disk: Disk) -> None:
    """After the fault something new is saved and comes back from disk, without a restart."""
    assert engine.cache is not None
    before = engine.cache.stats().bytes_written
    goes_on(engine, range(20, 22))
    engine.settle()
    assert engine.cache.stats().bytes_written > before
    engine.ask(prompt(40, salt=1), cache=False)
    _, n_cached = engine.ask(prompt(150, salt=521))
    assert n_cached > 100
    assert Place(disk.folder).temps() == []


def heals(engine: Running, wanted: list[int]) -> None:
    """Rows that are known and gone are met one by one; each request saves what it found missing."""
    found = []
    for salt in range(30, 36):
        goes_on(engine, range(salt, salt + 1))
        again, n_cached = engine.ask(LONG)
        engine.settle()
        assert again == wanted
        found.append(n_cached)
    assert found[-1] > 100, found


def spoil(path: Path, dice: random.Random, n_flips: int) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(n_flips):
        at = dice.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)
