"""Recovery: what a start finds, and what dead writers left.

Adopts whole rows by name and size alone (the first read verifies them), so a start opens no file and 100,000 rows take
about a second. Deletes temporaries whose writer is dead or silent too long, files that cannot be rows, and folders of
other versions. Rows of another block size may be another process's, and go once nobody uses them. A linked row whose
writer died before announcing it is verified, then adopted or deleted.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from kvasir.cache.codec import MAX_PARTS, Damaged, decode_header, header_bytes
from kvasir.cache.index import Index
from kvasir.cache.owner import Owner, is_dead, me
from kvasir.cache.publish import discard
from kvasir.cache.row import RowName
from kvasir.cache.tiers import FileTier, looks_whole

# A temporary's header is read to learn its row's name; no span is longer than this many tokens in practice.
_HEAD_TOKENS = 1 << 16
# Another block size may be another running process's choice; a week without a write or a hit says that it is not.
FORGOTTEN_S = 7 * 24 * 3600.0


class Recovered(NamedTuple):
    """What a look at a tier changed."""

    adopted: int = 0
    swept: int = 0
    corrupt: int = 0
    linked: tuple[RowName, ...] = ()  # rows a dead writer had made visible but not announced

    def plus(self, other: Recovered) -> Recovered:
        """Both together."""
        counts = (self.adopted + other.adopted, self.swept + other.swept, self.corrupt + other.corrupt)
        return Recovered(*counts, self.linked + other.linked)


def recover(tier: FileTier, index: Index, *, ttl_s: float, now: float) -> Recovered:
    """Look at everything in a tier: at a start, and when the index may have missed other processes' rows."""
    with tier.ledger.held(), _collector_paused():
        swept = _sweep_other_layouts(tier, now=now)
        temps = sweep(tier, index, ttl_s=ttl_s, now=now)
        found = list(tier.scan())
        whole = [each for each in found if looks_whole(each)]
        bad = sum(tier.remove(each.name) for each in found if not looks_whole(each)) if len(whole) < len(found) else 0
        adopted = index.add_found(tier.name, whole)
        tier.ledger.settle(sum(each.n_bytes for each in whole) + tier.other_bytes())
    return temps.plus(Recovered(adopted, swept + bad, bad))


def sweep(tier: FileTier, index: Index, *, ttl_s: float, now: float) -> Recovered:
    """Deal with what dead or silent writers left in the tier's temporary folder."""
    total = Recovered()
    for path in tier.temps():
        if _is_abandoned(tier, path, ttl_s=ttl_s, now=now):
            done = _clear_up(tier, index, path)
            total = total.plus(done)
    if total.swept:
        tier.recount()  # a writer that died between booking a file and making it left no other trace
    return total


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection for this second: walking 100,000 new rows again and again took 40 % of a start."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_abandoned(tier: FileTier, path: str, *, ttl_s: float, now: float) -> bool:
    owner = Owner.parse(PurePath(path).name)
    if owner is None or is_dead(owner):
        return True
    if owner == me():
        return path not in tier.active
    try:
        return tier.files.stat(path).st_mtime + ttl_s < now
    except FileNotFoundError:
        return False


def _clear_up(tier: FileTier, index: Index, path: str) -> Recovered:
    """Delete a temporary; if its row is visible already, verify that and adopt or delete it."""
    name = _linked_row(tier, path)
    discard(tier, path)
    if name is None or index.has(name.key, tier.name):
        return Recovered(swept=1)
    try:
        tier.load(name, lambda _: True)
        found = tier.probe(name)
    except Damaged:
        tier.remove(name)
        return Recovered(swept=1, corrupt=1)
    except FileNotFoundError:
        return Recovered(swept=1)
    adopted = index.add_found(tier.name, [found] if found is not None else ())
    return Recovered(adopted=adopted, swept=1, linked=(name,) if adopted else ())


def _linked_row(tier: FileTier, path: str) -> RowName | None:
    """The row a temporary has become, or None if it has no second name."""
    with suppress(FileNotFoundError, Damaged):
        if tier.files.stat(path).st_nlink < 2:
            return None
        fd = tier.files.open(path)
        try:
            size = tier.files.size(fd)
            head = tier.files.pread(fd, min(size, header_bytes(MAX_PARTS, _HEAD_TOKENS)), 0)
            return decode_header(head, file_size=size).name
        finally:
            tier.files.close(fd)
    return None


def _sweep_other_layouts(tier: FileTier, *, now: float) -> int:
    """Remove rows of other format versions, and of other block sizes that nobody has used for a while."""
    entries = [entry for entry in tier.files.scandir(tier.layout.root) if tier.layout.is_other(entry.name)]
    swept = [e for e in entries if tier.layout.is_other_version(e.name) or now - _last_used(e.path) > FORGOTTEN_S]
    for entry in swept:
        shutil.rmtree(entry.path, ignore_errors=True)
    return len(swept)


def _last_used(folder: str) -> float:
    newest = 0.0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                newest = max(newest, Path(path, name).stat().st_mtime)
    return newest
