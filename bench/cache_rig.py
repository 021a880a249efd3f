"""What the cache's comparisons share: models on a cache that outlives them, folders, and the kernel's books.

A model that opens its own cache closes it too, and then nothing is left in RAM; here the caller holds the cache, so an
engine can be fresh while the rows are not. Measures nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import Prompts, Unable

import kvasir
from kvasir import native
from kvasir.cache import Cache, CacheSettings
from kvasir.cache.settings import BLOCK_TOKENS
from kvasir.config import load_settings, store_settings
from kvasir.engine import Engine
from kvasir.model.weights import Weights
from kvasir.service.caching import bind
from kvasir.service.settings import engine_settings

MIB = 1 << 20
MB = 1e6
RAM_BYTES = 1 << 30
SHM = Path("/dev/shm")
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """What all parts run on."""

    path: Path
    threads: int
    words: Prompts


def setup_of(path: Path, threads: int) -> Setup:
    """Read the vocabulary, for prompts of exact length."""
    with kvasir.load(path, vocab_only=True) as model:
        return Setup(path, threads, Prompts(lambda text: model.tokenize(text, add_special=False)))


def open_cache(
    *, disk: Path | None = None, tmpfs: Path | None = None, ram_bytes: int = RAM_BYTES, block_tokens: int = BLOCK_TOKENS
) -> Cache:
    """A cache over these folders, and over no others of this machine."""
    return Cache.open(CacheSettings(ram_bytes=ram_bytes, disk_dir=disk, tmpfs_dir=tmpfs, block_tokens=block_tokens))


def open_model(
    setup: Setup, cache: Cache | None, *, observe: Callable[[Any], None] | None = None, **options: object
) -> kvasir.Model:
    """A model with a fresh engine, warmed up. Closing it leaves the cache open."""
    settings = load_settings({"threads": setup.threads, "cache": cache is not None, **options})
    with contextlib.ExitStack() as on_failure:
        weights = Weights.open(setup.path, settings, core=native)
        on_failure.callback(weights.close)
        binding = None if cache is None else bind(cache, weights, settings, store_settings(), core=native)
        told = replace(engine_settings(settings, weights.adapters), observe=observe)
        engine = Engine.open(weights.native, told, core=native, cache=binding)
        on_failure.callback(engine.close)
        model = kvasir.Model(native, weights, settings, engine, None)
        on_failure.pop_all()
    # So that no side pays for the first touch of the weights and for making threads.
    model.generate(setup.words.of(WARM_UP_TOKENS, seed="warm up"), cache=False, **greedy(2))
    return model


def greedy(n_tokens: int) -> dict[str, Any]:
    """The same tokens every time, and exactly so many."""
    return {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}


# Folders and files


@contextlib.contextmanager
def disk_folder() -> Iterator[Path]:
    """An empty folder on the file system that the cache uses by default; gone afterwards."""
    home = store_settings().home
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def tmpfs_copy(folder: Path) -> Iterator[Path | None]:
    """The same rows in memory; None on a machine without a tmpfs for everyone."""
    if not SHM.is_dir():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-", dir=SHM, ignore_cleanup_errors=True) as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        yield Path(copy)


def rows_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.row"))


def drop_pages(*paths: Path) -> None:
    """Make the next read of these files come from the medium."""
    if not hasattr(os, "posix_fadvise"):
        raise Unable("this system cannot drop a file's pages; run the other parts with --only")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def write_plain(path: Path, n_bytes: int) -> None:
    """A file of noise, which no file system can store in less."""
    with path.open("wb") as file:
        for _ in range(-(-n_bytes // MIB)):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())


def read_speed(path: Path) -> float:
    """Bytes per second of one thread that reads a file from the medium, front to back, and does nothing else."""
    drop_pages(path)
    buffer = bytearray(MIB)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        n_bytes = sum(iter(lambda: file.readinto(buffer), 0))
    return n_bytes / (time.perf_counter() - started)


def medium_bytes() -> int:
    """Bytes this process has had read from a medium so far; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def cache_cpu_s() -> float:
    """CPU seconds that the cache's threads alive now have used."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvasir-cache-")]
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None)
    return sum(time.clock_gettime(clock) for clock in clocks)
