"""Publish: how a row becomes a file that others may read.

    reserved       a ticket is held; nobody else in this process publishes this row here
    created        quota taken, temporary file made at full length
    written        header and parts are in it
    synced         and on the medium
    checked        the ticket is still ours
    linked         the row has its name: visible, whole
    folder_synced  and so it is after a power cut
    cleaned        the temporary name is gone
    announced      this process serves it

Each stage from `created` to `linked` renews the ticket, and the temporary's time for other processes: a slow medium
may take long in all, but no longer than the ticket's life over one stage.

Only whole rows are ever visible, because a name appears by `link(2)` of a synced file. Killed before `linked`, a
temporary is left, which the next start or a running sibling deletes; killed after, a row is left, which they adopt.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from itertools import count
from typing import NamedTuple

from kvasir.cache.codec import Damaged, encode_header
from kvasir.cache.files import make_folders
from kvasir.cache.key import Space
from kvasir.cache.owner import me
from kvasir.cache.row import Reason, RowName
from kvasir.cache.tickets import Ticket
from kvasir.cache.tiers import FileTier

STAGES = (
    "reserved",
    "created",
    "written",
    "synced",
    "checked",
    "linked",
    "folder_synced",
    "cleaned",
    "announced",
)

Stage = Callable[[str], None]

_serial = count()


class Outcome(StrEnum):
    """How a publish ended without an error."""

    PUBLISHED = "published"
    ADOPTED = "adopted"  # another process had published the same row; it was verified and kept
    LOST = "lost"  # too slow: the ticket lapsed, or someone took the temporary for a dead writer's
    NO_ROOM = "no_room"


class Sealed(NamedTuple):
    """A row with its bytes, ready to be written anywhere."""

    name: RowName
    space: Space
    tokens: bytes
    parts: Mapping[str, bytes]
    reason: Reason
    created_s: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(map(len, self.parts.values()))


def publish(row: Sealed, tier: FileTier, ticket: Ticket, stage: Stage, clock: Callable[[], float]) -> Outcome:
    """Write a row to a file tier; blocks for the disk. Raises `OSError`; what is visible then is whole all the same.

    The caller holds the ticket (stage `reserved`) and announces the row afterwards (stage `announced`).
    """
    header = encode_header(row.name, row.space, row.tokens, row.parts, row.reason, row.created_s)
    with _temporary(tier, len(header) + row.n_bytes) as temp:
        if temp is None:
            return Outcome.NO_ROOM
        renewed = partial(_renewed, tier, temp, ticket, stage, clock)
        if not (renewed("created") and _is_written(tier, temp, [header, *row.parts.values()], renewed)):
            return Outcome.LOST
        if not (_still_there(tier, temp) and renewed("checked")):
            return Outcome.LOST
        outcome = _link(tier, temp, row.name)
        renewed("linked")  # visible by now, whoever has the ticket
        tier.files.sync_folder(tier.layout.folder(row.name))
        stage("folder_synced")
    stage("cleaned")
    return outcome


class _Temp(NamedTuple):
    path: str
    fd: int


@contextmanager
def _temporary(tier: FileTier, n_bytes: int) -> Iterator[_Temp | None]:
    """A temporary file of full length, gone afterwards whatever happens; None if the quota has no room."""
    temp = _create(tier, n_bytes)
    try:
        yield temp
    finally:
        if temp is not None:
            tier.active.discard(temp.path)
            tier.files.close(temp.fd)
            discard(tier, temp.path)


def _create(tier: FileTier, n_bytes: int) -> _Temp | None:
    files = tier.files
    with tier.ledger.held():
        if tier.ledger.used() + n_bytes > tier.quota:
            return None
        make_folders(files, tier.layout.root, tier.layout.temp)
        path = f"{tier.layout.temp}/{me()}-{next(_serial)}.tmp"
        tier.ledger.add(n_bytes)
        tier.active.add(path)
        try:
            fd = _make_file(tier, path, n_bytes)
        except OSError:
            tier.active.discard(path)
            tier.ledger.add(-n_bytes)
            raise
    return _Temp(path, fd)


def _make_file(tier: FileTier, path: str, n_bytes: int) -> int:
    fd = tier.files.create(path)
    try:
        tier.files.allocate(fd, n_bytes)
    except OSError:
        tier.files.close(fd)
        tier.files.unlink(path)
        raise
    return fd


def discard(tier: FileTier, path: str) -> None:
    """Remove a temporary name; its bytes are given back unless the row has them by now."""
    with tier.ledger.held():
        try:
            facts = tier.files.stat(path)
            tier.files.unlink(path)
        except FileNotFoundError:
            return
        if facts.st_nlink == 1:
            tier.ledger.add(-facts.st_size)


def _renewed(
    tier: FileTier, temp: _Temp, ticket: Ticket, stage: Stage, clock: Callable[[], float], reached: str
) -> bool:
    """Tell that a stage is reached and renew the right to go on; False if that, or the temporary, is gone."""
    stage(reached)
    if not ticket.still_mine():
        return False
    try:
        tier.files.utime(temp.path, clock())
    except FileNotFoundError:
        return False
    return True


def _is_written(tier: FileTier, temp: _Temp, chunks: list[bytes], renewed: Callable[[str], bool]) -> bool:
    for chunk in chunks:
        tier.files.write(temp.fd, chunk)
    if not renewed("written"):
        return False
    tier.files.fsync(temp.fd)
    return renewed("synced")


def _still_there(tier: FileTier, temp: _Temp) -> bool:
    try:
        return tier.files.stat(temp.path).st_nlink == 1
    except FileNotFoundError:
        return False


def _link(tier: FileTier, temp: _Temp, name: RowName) -> Outcome:
    """Give the file its name. A file that has it already is verified, then kept or replaced."""
    path = tier.layout.path(name)
    for _ in range(8):
        try:
            make_folders(tier.files, tier.layout.root, tier.layout.folder(name))
            tier.files.link(temp.path, path)
        except FileExistsError:
            if _is_good(tier, name):
                return Outcome.ADOPTED
            tier.remove(name)
        except FileNotFoundError:
            # Someone removed the folder as empty, or everything: make it again, unless our own file is gone too.
            if not _still_there(tier, temp):
                return Outcome.LOST
        else:
            return Outcome.PUBLISHED
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def _is_good(tier: FileTier, name: RowName) -> bool:
    with suppress(Damaged, FileNotFoundError):
        tier.load(name, lambda _: True)
        return True
    return False
