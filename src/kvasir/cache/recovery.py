"""Recovery: what a start finds, and what dead writers left.

Adopts whole rows by name and size alone (the first read verifies them), so a start opens no file and 100,000 rows take
about a second. Deletes temporaries whose writer is dead or silent too long, files that cannot be rows, and folders of
other versions or block sizes. A linked row whose writer died before announcing it is verified, then adopted or deleted.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import PurePath
from typing import NamedTuple

from kvasir.cache.codec import MAX_PARTS, Damaged, decode_header, header_bytes
from kvasir.cache.index import Index
from kvasir.cache.owner import Owner, is_dead, me
from kvasir.cache.publish import discard
from kvasir.cache.row import RowName
from kvasir.cache.tiers import FileTier, Found, looks_whole

# A temporary's header is read to learn its row's name; no span is longer than this many tokens in practice.
_HEAD_TOKENS = 1 << 16


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
    with tier.ledger.held():
        swept = _sweep_other_versions(tier)
        temps = sweep(tier, index, ttl_s=ttl_s, now=now)
        adopted = bad = used = 0
        for found in tier.scan():
            if not looks_whole(found):
                bad += tier.remove(found.name)
            else:
                used += found.n_bytes
                adopted += _adopt(tier, index, found)
        tier.ledger.settle(used + tier.other_bytes())
    return temps.plus(Recovered(adopted, swept + bad, bad))


def sweep(tier: FileTier, index: Index, *, ttl_s: float, now: float) -> Recovered:
    """Deal with what dead or silent writers left in the tier's temporary folder."""
    total = Recovered()
    for path in tier.temps():
        if _is_abandoned(tier, path, ttl_s=ttl_s, now=now):
            done = _clear_up(tier, index, path)
            total = total.plus(done)
    return total


def _adopt(tier: FileTier, index: Index, found: Found) -> bool:
    if index.has(found.name.key, tier.name):
        return False
    return index.add(found.name, tier.name, found.n_bytes, last_used=found.last_used)


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
    adopted = found is not None and _adopt(tier, index, found)
    return Recovered(adopted=int(adopted), swept=1, linked=(name,) if adopted else ())


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


def _sweep_other_versions(tier: FileTier) -> int:
    others = [entry for entry in tier.files.scandir(tier.layout.root) if tier.layout.is_other(entry.name)]
    for entry in others:
        shutil.rmtree(entry.path, ignore_errors=True)
    return len(others)
