"""A process that publishes the rows another one publishes at the same time.

    python -m tests.crash.twin FOLDER N_ROWS

Says "ready", waits for a line, publishes the N rows, says how many it published and how many it found published.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.cache import Cache
from tests.unit.cache.rig import BLOCK, offer_all, settings

N_BYTES = 256


def tokens_of(number: int) -> list[int]:
    return [number] * BLOCK


def run(folder: Path, n_rows: int) -> None:
    with Cache.open(settings(folder, ram_bytes=0, writer_queue_bytes=1 << 30)) as cache:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(n_rows):
            offer_all(cache, tokens_of(number), n_bytes=N_BYTES)
            if number % 100 == 99:
                cache.flush()
        cache.flush()
        stats = cache.stats()
        assert stats.saves_dropped == 0, stats
        assert stats.write_errors == 0, stats
        print(n_rows - stats.adopted, stats.adopted, flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
