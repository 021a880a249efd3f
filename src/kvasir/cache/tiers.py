"""Places rows live: RAM, and files at a root (tmpfs and disk are one class at two roots).

A tier moves bytes and enforces its quota; it knows no index, so it neither chooses what to evict nor who is asked
first. A fourth tier, shared by a cluster, would be one more class with `load` and `remove`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvasir.cache.codec import (
    LEAST_BYTES,
    MAX_PARTS,
    Damaged,
    Header,
    check_name,
    check_part,
    decode_header,
    header_bytes,
)
from kvasir.cache.files import Files
from kvasir.cache.key import Key
from kvasir.cache.ledger import Ledger
from kvasir.cache.names import Layout, parse, parse_space
from kvasir.cache.row import RowName

RAM = "ram"
TMPFS = "tmpfs"
DISK = "disk"
ORDER = (RAM, TMPFS, DISK)  # fastest first

Wanted = Callable[[str], bool]


class Tier(Protocol):
    """What every tier can do."""

    @property
    def name(self) -> str:
        """One of `ORDER`."""

    @property
    def quota(self) -> int:
        """Bytes it may hold."""

    def remove(self, name: RowName) -> bool:
        """Take a row away; False if it was not there. May raise `OSError`."""


class RamTier:
    """Rows in this process's memory. Any thread."""

    name = RAM

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._lock = threading.Lock()
        self._rows: dict[Key, Mapping[str, bytes]] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._used

    def put(self, key: Key, parts: Mapping[str, bytes]) -> int | None:
        """Hold a row's parts beside those held already: the row's bytes here, or None if the quota has no room."""
        with self._lock:
            held = self._rows.get(key, {})
            new = {name: content for name, content in parts.items() if name not in held}
            n_bytes = sum(map(len, new.values()))
            if self._used + n_bytes > self.quota:
                return None
            whole = self._rows[key] = {**held, **new}
            self._used += n_bytes
            return sum(map(len, whole.values()))

    def get(self, key: Key, wanted: Wanted) -> dict[str, bytes] | None:
        """The wanted parts of those held, or None if the row is not here."""
        held = self._rows.get(key)
        return None if held is None else {name: content for name, content in held.items() if wanted(name)}

    def remove(self, name: RowName) -> bool:
        """Let a row go."""
        return self.take(name.key) is not None

    def take(self, key: Key) -> Mapping[str, bytes] | None:
        """Let a row go and return what was held."""
        with self._lock:
            held = self._rows.pop(key, None)
            self._used -= sum(map(len, (held or {}).values()))
            return held


class Found(NamedTuple):
    """A row file as its folder shows it: not opened yet."""

    name: RowName
    n_bytes: int
    last_used: float


class FileTier:
    """Rows as files under one root, shared with other processes. Any thread; every method may raise `OSError`."""

    def __init__(
        self, name: str, root: str, quota: int, *, block_tokens: int, files: Files, free_share: float = 0.0
    ) -> None:
        self.name = name
        self.quota = quota
        self.files = files
        self.layout = Layout(root, block_tokens)
        self.ledger = Ledger(root, files, self._measure)
        self.active: set[str] = set()  # temporaries this process is writing now
        self._free_share = free_share

    def probe(self, name: RowName) -> Found | None:
        """Whether a row's file is there, by one `stat`."""
        try:
            facts = self.files.stat(self.layout.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Found(name, facts.st_size, facts.st_mtime)

    def tail_ends(self, space: Key, parent: Key) -> set[int]:
        """Where the tails that follow a prefix end, by one listing; whoever knows the tokens knows their names then."""
        entries = self.files.scandir(self.layout.tails(space, parent))
        texts = {entry.name[entry.name.rfind("-") + 1 : -4] for entry in entries if entry.name.endswith(".row")}
        return {int(text) for text in texts if text.isdecimal()}

    def header(self, name: RowName) -> Header:
        """A row's head, verified. Raises `Damaged`, `FileNotFoundError`."""
        header, _ = self.load(name, lambda _: False)
        return header

    def load(self, name: RowName, wanted: Wanted) -> tuple[Header, dict[str, bytes]]:
        """A row's head and its wanted parts, all verified. Raises `Damaged`, `FileNotFoundError`."""
        fd = self.files.open(self.layout.path(name))
        try:
            size = self.files.size(fd)
            head = self.files.pread(fd, min(size, header_bytes(MAX_PARTS, name.n_tokens)), 0)
            header = decode_header(head, file_size=size)
            check_name(header, name)
            return header, {part: self._part(fd, header, part) for part in header.parts if wanted(part)}
        finally:
            self.files.close(fd)

    def touch(self, name: RowName, when: float) -> None:
        """Tell the other processes that a row was used."""
        self.files.utime(self.layout.path(name), when)

    def shortage(self, n_bytes: int) -> int:
        """Bytes to free before so many more fit the quota and leave others their share of the file system."""
        with self.ledger.held():
            over = self.ledger.used() + n_bytes - self.quota
        free, total = self.files.free_bytes(self.layout.root)
        return max(0, over, n_bytes + int(self._free_share * total) - free)

    def remove(self, name: RowName) -> bool:
        """Delete a row's file and give its bytes back."""
        path = self.layout.path(name)
        with self.ledger.held():
            try:
                n_bytes = self.files.stat(path).st_size
                self.files.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            self.ledger.add(-n_bytes)
        if not self.layout.is_block(name):
            self.drop_folder(self.layout.folder(name))
        return True

    def drop_folder(self, path: str) -> None:
        """Remove a folder if it is empty; another process may be filling it, and then it stays."""
        try:
            self.files.rmdir(path)
        except OSError:
            return

    def scan(self) -> Iterator[Found]:
        """Every row file there is, by names and sizes only."""
        for space_entry in self.files.scandir(self.layout.top):
            space = parse_space(space_entry.name)
            if space is None:
                continue
            for kind in ("blocks", "tails"):
                for folder in self.files.scandir(f"{space_entry.path}/{kind}"):
                    yield from self._scan_folder(space, folder.path)

    def temps(self) -> list[str]:
        """Paths of files being written, or left behind."""
        return [entry.path for entry in self.files.scandir(self.layout.temp)]

    def is_gone(self) -> bool:
        """Whether the folder of all rows is not there."""
        try:
            self.files.stat(self.layout.top)
        except FileNotFoundError:
            return True
        return False

    def close(self) -> None:
        """Let the ledger's file go."""
        self.ledger.close()

    def _scan_folder(self, space: Key, path: str) -> Iterator[Found]:
        for entry in self.files.scandir(path):
            name = parse(space, entry.name)
            if name is None:
                continue
            try:
                facts = entry.stat()
            except FileNotFoundError:
                continue
            yield Found(name, facts.st_size, facts.st_mtime)

    def _part(self, fd: int, header: Header, part: str) -> bytes:
        entry = header.parts[part]
        content = self.files.pread(fd, entry.n_bytes, entry.offset)
        check_part(content, entry)
        return content

    def recount(self) -> None:
        """Make the ledger say what is really here."""
        with suppress(OSError), self.ledger.held():
            self.ledger.settle(self._measure())

    def _measure(self) -> int:
        return sum(found.n_bytes for found in self.scan()) + self.other_bytes()

    def other_bytes(self) -> int:
        """Bytes here that are no rows of ours: temporaries that have no second name, and other layouts' files."""
        others = [entry.path for entry in self.files.scandir(self.layout.root) if self.layout.is_other(entry.name)]
        walked = (f"{folder}/{name}" for other in others for folder, _, names in os.walk(other) for name in names)
        total = 0
        for path in (*self.temps(), *walked):
            with suppress(FileNotFoundError):
                facts = self.files.stat(path)
                total += facts.st_size if facts.st_nlink == 1 else 0
        return total


def looks_whole(found: Found) -> bool:
    """Whether a file could hold the row it is named after: a cheap test for a start that opens nothing."""
    return found.n_bytes >= LEAST_BYTES + 4 * found.name.n_tokens


__all__ = ["DISK", "ORDER", "RAM", "TMPFS", "Damaged", "FileTier", "Found", "RamTier", "Tier", "Wanted", "looks_whole"]
