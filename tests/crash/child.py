"""A process that publishes until it is killed, and tells its parent what it has announced.

    python -m tests.crash.child FOLDER SEED STAGE TIMES

Offers rows with known bytes. Each line of output is the number of a conversation whose every row is announced. With a
STAGE it kills itself, as `kill -9` would, when a publish reaches that stage for the TIMESth time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from itertools import count
from pathlib import Path

from kvasir.cache import Cache
from tests.unit.cache.rig import BLOCK, KIB, check, offer_all, settings, space


def conversation(number: int) -> list[int]:
    """Tokens of a conversation: a shared beginning, then its own."""
    return [*range(2 * BLOCK), *([number] * (BLOCK + number % BLOCK + 1))]


def run(folder: Path, seed: int, stage: str, times: int) -> None:
    left = [times]

    def at(name: str) -> None:
        if name == stage:
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    order = random.Random(seed)
    with Cache.open(settings(folder, ram_bytes=64 * KIB, writer_threads=2), stage=at) as cache:
        for _ in count():
            number = order.randrange(400)
            tokens = conversation(number)
            check(cache, cache.longest(space(), tokens), tokens)
            offer_all(cache, tokens)
            if cache.flush(60) and cache.stats().saves_dropped == 0:
                print(number, flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
