"""What the cache itself costs, without any model: keys, format, index, publish and read.

Prints a table and the machine's load, for the figures mean nothing without it. There is no other program to
compare with; the targets are 3 s to open an index of 100,000 rows and 5 ms to search 32,000 tokens in it.
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
from pathlib import Path

from kvasir.cache import Cache, CacheSettings, Reason, Space
from kvasir.cache.codec import checksum, decode_header, encode_header
from kvasir.cache.index import Index
from kvasir.cache.key import pack
from kvasir.cache.names import Layout
from kvasir.cache.row import RowName

BLOCK = 256
N_ROWS = 100_000
PROMPT_TOKENS = 32_000
MIB = 1 << 20
# SmolLM2-135M: 30 layers, K and V, 192 values of 2 bytes, 256 tokens.
BLOCK_BYTES = 30 * 2 * 192 * 2 * BLOCK

SPACE = Space(b"f" * 32, 1, 1, b"c" * 32)


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    keys()
    codec()
    index()
    tiers()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def keys() -> None:
    tokens = [random.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    packed = array("I", tokens)
    for name, given in (("list", tokens), ("array", packed)):
        seconds = best_of(20, lambda given=given: SPACE.boundaries(given, BLOCK))
        show(
            f"keys of {PROMPT_TOKENS:,} tokens from a {name}",
            f"{seconds * 1e3:.2f} ms",
            f"{seconds / PROMPT_TOKENS * 1e9:.0f} ns/token",
        )


def codec() -> None:
    content = os.urandom(BLOCK_BYTES)
    tokens = list(range(BLOCK))
    name = RowName(SPACE.root, SPACE.key(tokens), SPACE.root, 0, BLOCK)
    parts = {"base": content}
    seconds = best_of(20, lambda: encode_header(name, SPACE, pack(tokens), parts, Reason.COLD, 0))
    show(
        "encode a row of 256 tokens (checksum of its part)",
        f"{seconds * 1e3:.2f} ms",
        f"{BLOCK_BYTES / seconds / 2**30:.2f} GiB/s",
    )
    header = encode_header(name, SPACE, pack(tokens), parts, Reason.COLD, 0)
    seconds = best_of(200, lambda: decode_header(header, file_size=len(header) + BLOCK_BYTES))
    show("decode and verify a header", f"{seconds * 1e6:.0f} us", "")
    seconds = best_of(20, lambda: checksum(content))
    show("verify a part", f"{seconds * 1e3:.2f} ms", f"{BLOCK_BYTES / seconds / 2**30:.2f} GiB/s")


def index() -> None:
    """A folder of 100,000 rows, one of them a 32,000-token conversation: start, search, memory."""
    with folder() as path:
        prompt = plant(path)
        settings = CacheSettings(ram_bytes=0, disk_dir=path, disk_bytes=1 << 40, free_share=0.0)
        begun = time.perf_counter()
        cache = Cache.open(settings)
        show(f"start with {N_ROWS:,} rows", f"{time.perf_counter() - begun:.2f} s", "under 3 s wanted")
        assert cache.stats().tiers["disk"].rows == N_ROWS
        search(cache, prompt, "found to the end")
        search(cache, [*prompt[: PROMPT_TOKENS // 2], *prompt[: PROMPT_TOKENS // 2]], "differs in the middle")
        search(cache, [7, *prompt[1:]], "not there")
        cache.close()
    victims()


def search(cache: Cache, prompt: list[int], what: str) -> None:
    def once() -> None:
        cache.longest(SPACE, prompt).release()

    once()
    times = sorted(timed(once) for _ in range(50))
    middle = statistics.median(times)
    show(
        f"search a {PROMPT_TOKENS:,}-token prompt, {what}",
        f"{middle * 1e3:.2f} ms, p95 {times[47] * 1e3:.2f}",
        f"{middle / PROMPT_TOKENS * 1e9:.0f} ns/token, under 5 ms wanted",
    )


def victims() -> None:
    table = Index()
    for at in range(N_ROWS):
        key = SPACE.key((at,))
        table.add(RowName(SPACE.root, key, SPACE.root, 0, 1), "disk", 100, last_used=float(at))
    seconds = timed(lambda: table.take_victims("disk", 100 * 1000))
    show("choose one victim of 100,000", f"{seconds / 1000 * 1e6:.1f} us", "")


def plant(root: Path) -> list[int]:
    """Files with the right names and sizes; a start opens none of them."""
    layout = Layout(str(root), BLOCK)
    prompt = [random.randrange(49_152) for _ in range(PROMPT_TOKENS)]
    names = [*rows_of(prompt)]
    while len(names) < N_ROWS:
        names += rows_of([random.randrange(49_152) for _ in range(BLOCK * 20 + 100)])
    blank = b"\0" * (4 * BLOCK + 400)
    for folder_of in {layout.folder(name) for name in names[:N_ROWS]}:
        Path(folder_of).mkdir(parents=True, exist_ok=True)
    for name in names[:N_ROWS]:
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


def tiers() -> None:
    """4,096 tokens of SmolLM2-135M, 16 blocks: publish, then read from each tier."""
    tokens = list(range(4096))
    content = [os.urandom(BLOCK_BYTES) for _ in range(4096 // BLOCK)]
    total = len(content) * BLOCK_BYTES
    for tier, parent in (("disk", None), ("tmpfs", "/dev/shm")):
        if parent is not None and not Path(parent).is_dir():
            continue
        with folder(parent) as path:
            place = {f"{tier}_dir": path}
            quiet = CacheSettings(ram_bytes=0, free_share=0.0, writer_queue_bytes=1 << 30, **place)  # type: ignore[arg-type]
            with Cache.open(quiet) as cache:
                seconds = timed(lambda cache=cache: offer(cache, tokens, content))
                show(
                    f"publish {total / MIB:.0f} MiB to {tier}",
                    f"{seconds * 1e3:.0f} ms",
                    f"{total / MIB / seconds:.0f} MiB/s",
                )
                read_rows(cache, tokens, f"{tier}, in the page cache", total, nothing)
                if tier == "disk":
                    read_rows(cache, tokens, "disk, page cache dropped", total, lambda path=path: drop_page_cache(path))
    with Cache.open(CacheSettings(ram_bytes=2 * total)) as cache:
        seconds = timed(lambda: offer(cache, tokens, content))
        show(f"offer {total / MIB:.0f} MiB to RAM", f"{seconds * 1e3:.2f} ms", f"{seconds / 16 * 1e6:.0f} us/row")
        read_rows(cache, tokens, "RAM", total, nothing)


def offer(cache: Cache, tokens: list[int], content: list[bytes]) -> None:
    for at, part in enumerate(content):
        start, end = at * BLOCK, (at + 1) * BLOCK
        cache.offer(SPACE, tokens, start=start, end=end, parts={"base": part}, reason=Reason.COLD)
    assert cache.flush(120)


def read_rows(cache: Cache, tokens: list[int], name: str, total: int, prepare: Callable[[], None]) -> None:
    def once() -> None:
        with cache.longest(SPACE, tokens) as match:
            assert len(cache.read(match).result(120)) == 4096 // BLOCK

    times = []
    for _ in range(9):
        prepare()
        times.append(timed(once))
    middle = statistics.median(times)
    figure = f"{middle * 1e3:.1f} ms, best {min(times) * 1e3:.1f}"
    show(f"search and read {total / MIB:.0f} MiB from {name}", figure, f"{total / MIB / middle:,.0f} MiB/s")


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


def show(what: str, figure: str, note: str) -> None:
    print(f"{what:<62} {figure:>26}   {note}", flush=True)


if __name__ == "__main__":
    main()
