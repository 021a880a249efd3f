"""What the cache itself costs, without any model: keys, format, index, publish and read.

There is no other program to compare with; the targets are 3 s to open an index of 100,000 rows and 5 ms to search
32,000 tokens in it.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import harness
from harness import Figures, Report, Section, Verdict

from kvasir.cache import Cache, CacheSettings, Reason, Space
from kvasir.cache.codec import checksum, decode_header, encode_header
from kvasir.cache.index import Index
from kvasir.cache.key import pack
from kvasir.cache.names import Layout
from kvasir.cache.row import RowName

BLOCK = 256
N_ROWS = 100_000
OPEN_S = 3.0
SEARCH_MS = 5.0
PROMPT_TOKENS = 32_000
MIB = 1 << 20
# SmolLM2-135M: 30 layers, K and V, 192 values of 2 bytes, 256 tokens.
BLOCK_BYTES = 30 * 2 * 192 * 2 * BLOCK

SPACE = Space(b"f" * 32, 1, 1, b"c" * 32)


def main() -> int:
    """Measure, report, keep."""
    arguments = harness.options("What the cache itself costs, without any model.", rounds=1).parse_args()
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    n_rows = N_ROWS // 20 if arguments.quick else N_ROWS
    report = Report("cache_index", "The cache without a model", machine, "no model", {"rows": n_rows})
    report.sections = [Section("Keys and headers", {**keys(), **codec()}), index(n_rows), Section("Tiers", tiers())]
    return harness.finish(report, arguments)


def keys() -> dict[str, Figures]:
    tokens = [random.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    found = {}
    for name, given in (("list", tokens), ("array", array("I", tokens))):
        seconds = best_of(20, lambda given=given: SPACE.boundaries(given, BLOCK))
        found[f"keys of {PROMPT_TOKENS:,} tokens from a {name}"] = per_token(seconds)
    return found


def per_token(seconds: float) -> Figures:
    return {"ms": seconds * 1e3, "ns/token": seconds / PROMPT_TOKENS * 1e9}


def codec() -> dict[str, Figures]:
    content = os.urandom(BLOCK_BYTES)
    tokens = list(range(BLOCK))
    name = RowName(SPACE.root, SPACE.key(tokens), SPACE.root, 0, BLOCK)
    parts = {"base": content}
    header = encode_header(name, SPACE, pack(tokens), parts, Reason.COLD, 0)
    encode_s = best_of(20, lambda: encode_header(name, SPACE, pack(tokens), parts, Reason.COLD, 0))
    decode_s = best_of(200, lambda: decode_header(header, file_size=len(header) + BLOCK_BYTES))
    verify_s = best_of(20, lambda: checksum(content))
    return {
        "encode a row of 256 tokens, checksum included": {"ms": encode_s * 1e3, "MiB/s": BLOCK_BYTES / MIB / encode_s},
        "decode and verify a header": {"ms": decode_s * 1e3},
        "verify a part": {"ms": verify_s * 1e3, "MiB/s": BLOCK_BYTES / MIB / verify_s},
    }


def index(n_rows: int) -> Section:
    """A folder of rows, some of them a 32,000-token conversation: start, search, victims."""
    with folder() as path:
        prompt = plant(path, n_rows)
        settings = CacheSettings(ram_bytes=0, disk_dir=path, disk_bytes=1 << 40, free_share=0.0)
        begun = time.perf_counter()
        cache = Cache.open(settings)
        open_s = time.perf_counter() - begun
        assert cache.stats().tiers["disk"].rows == n_rows
        half = PROMPT_TOKENS // 2
        rows = {
            "open": {"ms": open_s * 1e3},
            "search, all of it there": search(cache, prompt),
            "search, differs in the middle": search(cache, [*prompt[:half], *prompt[:half]]),
            "search, not there": search(cache, [7, *prompt[1:]]),
            "choose one victim": {"ms": victims(n_rows) * 1e3},
        }
        cache.close()
    slowest = max(figures["p95 ms"] for name, figures in rows.items() if name.startswith("search"))
    verdicts = [
        Verdict(f"{OPEN_S:.0f} s / to open", OPEN_S / open_s, 1.0),
        Verdict(f"{SEARCH_MS:.0f} ms / p95 of the slowest search", SEARCH_MS / slowest, 1.0),
    ]
    return Section(f"{n_rows:,} rows, a prompt of {PROMPT_TOKENS:,} tokens", rows, verdicts)


def search(cache: Cache, prompt: list[int]) -> Figures:
    def once() -> None:
        cache.longest(SPACE, prompt).release()

    once()
    times = sorted(timed(once) for _ in range(50))
    return {**per_token(statistics.median(times)), "p95 ms": times[47] * 1e3}


def victims(n_rows: int) -> float:
    """Seconds to choose one, of a thousand chosen."""
    table = Index()
    for at in range(n_rows):
        key = SPACE.key((at,))
        table.add(RowName(SPACE.root, key, SPACE.root, 0, 1), "disk", 100, last_used=float(at))
    return timed(lambda: table.take_victims("disk", 100 * 1000)) / 1000


def plant(root: Path, n_rows: int) -> list[int]:
    """Files with the right names and sizes; a start opens none of them."""
    layout = Layout(str(root), BLOCK)
    prompt = [random.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    names = [*rows_of(prompt)]
    while len(names) < n_rows:
        names += rows_of([random.randrange(49_152) for _ in range(BLOCK * 20 + 100)])
    blank = b"\0" * (4 * BLOCK + 400)
    for folder_of in {layout.folder(name) for name in names[:n_rows]}:
        Path(folder_of).mkdir(parents=True, exist_ok=True)
    for name in names[:n_rows]:
        fd = os.open(layout.path(name), os.O_CREAT | os.O_WRONLY)
        os.write(fd, blank)
        os.close(fd)
    return prompt


def rows_of(tokens: list[int]) -> list[RowName]:
    ends = [*range(BLOCK, len(tokens) + 1, BLOCK)]
    if ends[-1] != len(tokens):
        ends.append(len(tokens))
    keys_ = [SPACE.root, *SPACE.keys_at(tokens, ends)]
    starts = [0, *ends]
    return [
        RowName(SPACE.root, key, parent, start, end)
        for key, parent, start, end in zip(keys_[1:], keys_, starts, ends, strict=False)
    ]


def tiers() -> dict[str, Figures]:
    """4,096 tokens of SmolLM2-135M, 16 blocks: publish, then read from each tier."""
    tokens = list(range(4096))
    content = [os.urandom(BLOCK_BYTES) for _ in range(4096 // BLOCK)]
    total = len(content) * BLOCK_BYTES / MIB
    found: dict[str, Figures] = {}
    for tier, parent in (("disk", None), ("tmpfs", "/dev/shm")):
        if parent is not None and not Path(parent).is_dir():
            continue
        with folder(parent) as path:
            place = {f"{tier}_dir": path}
            quiet = CacheSettings(ram_bytes=0, free_share=0.0, writer_queue_bytes=1 << 30, **place)  # type: ignore[arg-type]
            with Cache.open(quiet) as cache:
                publish_s = timed(lambda cache=cache: offer(cache, tokens, content))
                found[f"publish {total:.0f} MiB to {tier}"] = {"ms": publish_s * 1e3, "MiB/s": total / publish_s}
                found[f"search and read it from {tier}, in the page cache"] = read_rows(cache, tokens, total, nothing)
                if tier == "disk":
                    drop = partial(drop_page_cache, path)
                    found["search and read it from disk, page cache dropped"] = read_rows(cache, tokens, total, drop)
    with Cache.open(CacheSettings(ram_bytes=2 * sum(map(len, content)))) as cache:
        offer_s = timed(lambda: offer(cache, tokens, content))
        found[f"offer {total:.0f} MiB to RAM"] = {"ms": offer_s * 1e3}
        found["search and read it from RAM"] = read_rows(cache, tokens, total, nothing)
    return found


def offer(cache: Cache, tokens: list[int], content: list[bytes]) -> None:
    for at, part in enumerate(content):
        start, end = at * BLOCK, (at + 1) * BLOCK
        cache.offer(SPACE, tokens, start=start, end=end, parts={"base": part}, reason=Reason.COLD)
    assert cache.flush(120)


def read_rows(cache: Cache, tokens: list[int], total: float, prepare: Callable[[], None]) -> Figures:
    def once() -> None:
        with cache.longest(SPACE, tokens) as match:
            assert len(cache.read(match).result(120)) == 4096 // BLOCK

    times = []
    for _ in range(9):
        prepare()
        times.append(timed(once))
    middle = statistics.median(times)
    return {"ms": middle * 1e3, "MiB/s": total / middle}


def nothing() -> None:
    return


def drop_page_cache(root: Path) -> None:
    for path in root.rglob("*.row"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@contextmanager
def folder(parent: str | None = None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvasir-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def best_of(times: int, work: Callable[[], object]) -> float:
    return min(timed(work) for _ in range(times))


if __name__ == "__main__":
    harness.run(main)
