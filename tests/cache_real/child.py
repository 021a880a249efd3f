"""A process that serves prompts with a cache on disk until it is killed.

    python -m tests.cache_real.child MODEL FOLDER ANSWERS SEED

ANSWERS holds prompts and what a run without cache says to them. Three threads ask for them at random; a wrong answer
ends the process with status 3. Each line of output is a number of tokens that came from the cache.
"""

from __future__ import annotations

import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvasir

N_THREADS = 3
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def load(model: Path, folder: Path) -> kvasir.Model:
    """A model with little RAM for rows, so that they are read from files, and room for a few dozen on disk."""
    return kvasir.load(
        model, cache_dir=folder, threads=1, slots=2, context_size=1024, cache_ram_bytes=32 << 10,
        cache_disk_bytes=2 << 20, block_tokens=32, boundary_align_tokens=32, continued_interval=32,
    )  # fmt: skip


def serve(model: Path, folder: Path, answers: list[tuple[list[int], list[int]]], seed: int) -> None:
    def work(number: int) -> None:
        dice = random.Random(1000 * seed + number)
        while True:
            tokens, wanted = dice.choice(answers)
            done = opened.generate(tokens, **ASKED)
            if list(done.tokens) != wanted:
                print(f"wrong: {list(done.tokens)}, wanted {wanted}", file=sys.stderr, flush=True)
                os._exit(3)
            os.write(1, b"%d\n" % done.usage.cached_tokens)  # whole lines, whichever thread is killed where

    with load(model, folder) as opened, ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()), int(sys.argv[4]))
