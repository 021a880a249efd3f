"""The row file: one format, written in one place, read with suspicion.

    offset  bytes
         0      4  magic "KVSR"
         4      1  version                          another version is not ours to read
         5      1  reason                           its place in `Reason`
         6      1  number of parts
         7      1  zero
         8     32  key                              of the prefix [0, end)
        40     32  parent                           key of the prefix [0, start)
        72     66  space head                       fingerprint, K type, V type, context hash
       138      2  zero
       140      4  start
       144      4  end
       148      8  created, seconds since 1970
       156   24*p  parts: name 8 (zero padded), length 8, xxh3 8
         .  4*n    tokens of the span, n = end - start
         .     16  blake2b of everything above      so it also guards the lengths and the parts' checksums
         .      .  the parts, in the table's order, to the end of the file: one byte more or less is damage

All numbers little endian. xxh3 for the bulk because it runs as fast as memory can be read (crc32 1.7 GiB/s on two
loaded cores, blake2b 0.3); 64 bits against chance, not against an enemy. Knows no path and no tier.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from kvasir.cache.key import Key, Space
from kvasir.cache.row import Reason, RowName

MAGIC = b"KVSR"
VERSION = 2
FIXED = struct.Struct("<4sBBBB32s32s66sHIIQ")
PART = struct.Struct("<8sQQ")
DIGEST_BYTES = 16
MAX_PARTS = 8
# More tokens than any span has: bounds what a damaged length can make a reader allocate.
MAX_SPAN = 1 << 24
LEAST_BYTES = FIXED.size + DIGEST_BYTES

_REASONS = tuple(Reason)


class Damaged(Exception):
    """These bytes are not the row they claim to be. Internal: a reader turns it into a miss."""


class OtherVersion(Damaged):
    """A row of another version of the format: not damage, but not ours to read either."""


@dataclass(frozen=True, slots=True)
class PartEntry:
    """Where a part lies in its file, and what it must add up to."""

    offset: int
    n_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """A row's head, decoded and verified."""

    name: RowName
    space: Space
    reason: Reason
    created_s: int
    tokens: bytes
    parts: Mapping[str, PartEntry]
    file_bytes: int

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each part."""
        return {name: part.n_bytes for name, part in self.parts.items()}


def header_bytes(n_parts: int, n_tokens: int) -> int:
    """Length of a header with so many parts and tokens."""
    return FIXED.size + n_parts * PART.size + 4 * n_tokens + DIGEST_BYTES


def file_bytes(n_tokens: int, parts: Mapping[str, bytes]) -> int:
    """Length of a whole row file."""
    return header_bytes(len(parts), n_tokens) + sum(map(len, parts.values()))


def encode_header(
    name: RowName, space: Space, tokens: bytes, parts: Mapping[str, bytes], reason: Reason, created_s: int
) -> bytes:
    """The head of a row file; the parts follow it in the mapping's order. `tokens` is the span, packed."""
    assert len(tokens) == 4 * name.n_tokens
    assert len(parts) <= MAX_PARTS
    n_parts, reason_at = len(parts), _REASONS.index(reason)
    fixed = (MAGIC, VERSION, reason_at, n_parts, 0, name.key, name.parent, space.head, 0, name.start, name.end)
    table = [PART.pack(part.encode("ascii"), len(content), checksum(content)) for part, content in parts.items()]
    head = b"".join((FIXED.pack(*fixed, created_s), *table, tokens))
    return head + _digest(head)


def decode_header(data: bytes, *, file_size: int) -> Header:
    """Verify and decode the head of a row file of `file_size` bytes; `data` may hold more than the head.

    Raises `Damaged` for anything that is not exactly what `encode_header` wrote.
    """
    if len(data) < LEAST_BYTES:
        raise Damaged(f"{len(data)} bytes are too few for a header")
    magic, version, reason, n_parts, zero, key, parent, head, zeros, start, end, created = FIXED.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("no row file")
    if version != VERSION:
        raise OtherVersion(f"format version {version}, wanted {VERSION}")
    if n_parts > MAX_PARTS or not start < end <= start + MAX_SPAN or zero or zeros or reason >= len(_REASONS):
        raise Damaged("impossible header")
    size = header_bytes(n_parts, end - start)
    if len(data) < size or _digest(data[: size - DIGEST_BYTES]) != data[size - DIGEST_BYTES : size]:
        raise Damaged("header checksum")
    parts = _part_table(data, n_parts, size)
    whole = size + sum(part.n_bytes for part in parts.values())
    if whole != file_size:
        raise Damaged(f"{file_size} bytes, wanted {whole}")
    space = Space.of_head(head)
    name = RowName(space.root, Key(key), Key(parent), start, end)
    tokens = data[size - DIGEST_BYTES - 4 * (end - start) : size - DIGEST_BYTES]
    return Header(name, space, _REASONS[reason], created, tokens, parts, whole)


def check_name(header: Header, wanted: RowName) -> None:
    """Raise `Damaged` unless the header is the wanted row's: a row swapped for another's file ends here."""
    if header.name != wanted:
        raise Damaged("the file holds another row")
    if header.name.start == 0 and header.space.key_of_packed(header.tokens) != wanted.key:
        raise Damaged("the tokens do not make the key")


def check_part(content: bytes | memoryview, part: PartEntry) -> None:
    """Raise `Damaged` unless these are the part's bytes."""
    if len(content) != part.n_bytes or checksum(content) != part.checksum:
        raise Damaged("part checksum")


def checksum(content: bytes | memoryview) -> int:
    """The sum of a part's bytes; other threads run meanwhile."""
    hasher = xxhash.xxh3_64()
    hasher.update(content)  # the one-call form would hold the interpreter's lock
    return hasher.intdigest()


def _part_table(data: bytes, n_parts: int, offset: int) -> dict[str, PartEntry]:
    parts: dict[str, PartEntry] = {}
    for at in range(n_parts):
        name, n_bytes, added_up = PART.unpack_from(data, FIXED.size + at * PART.size)
        parts[name.rstrip(b"\0").decode("ascii")] = PartEntry(offset, n_bytes, added_up)
        offset += n_bytes
    return parts


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
