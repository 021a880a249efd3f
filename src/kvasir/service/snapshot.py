"""A session as bytes: its tokens and how it samples, under a checksum.

Holds no KV: that is in the cache under these tokens, and where it is gone they are read again. Names the vocabulary
they belong to, because the same numbers mean another text in another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from kvasir import native
from kvasir.errors import BadRequest
from kvasir.types import Sampling

MAGIC = b"kvasir session 1\n"
N_CHECK = 32


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is, apart from its id and its worker."""

    vocab: bytes
    tokens: list[int]
    pending: list[int]
    sampling: dict[str, Any]  # what differs from the defaults
    scope: str | None
    priority: int
    n_said: int  # tokens at the end that the model said since the last input
    is_complete: bool  # whether its last reply came to an end of its own


def pack(snapshot: Snapshot) -> bytes:
    """Return the bytes of a snapshot."""
    body = msgspec.msgpack.encode(snapshot)
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, *, vocab: bytes) -> Snapshot:
    """Return the snapshot these bytes hold; `BadRequest` where they are damaged or of another vocabulary."""
    if not _is_bytes(data) or not bytes(data).startswith(MAGIC):
        raise BadRequest("these bytes are no snapshot of a session, or of another version; pass what snapshot() gave.")
    check, body = bytes(data)[len(MAGIC) :][:N_CHECK], bytes(data)[len(MAGIC) + N_CHECK :]
    if hashlib.sha256(body).digest() != check:
        raise BadRequest("the snapshot of a session is damaged: its checksum does not hold; use another copy.")
    snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    if snapshot.vocab != vocab:
        raise BadRequest("the snapshot is of a model with another vocabulary; restore it where that model is loaded.")
    return snapshot


def _is_bytes(data: object) -> bool:
    return isinstance(data, bytes | bytearray | memoryview)


def sampling_changes(sampling: Sampling) -> dict[str, Any]:
    """Return the options that differ from the defaults, as plain values; `BadRequest` for a schema that is a class."""
    usual = Sampling()
    changed = {each.name: getattr(sampling, each.name) for each in fields(Sampling)}
    changed = {name: value for name, value in changed.items() if value != getattr(usual, name)}
    schema = changed.get("json_schema")
    if schema is not None and not isinstance(schema, Mapping):
        raise BadRequest("a session whose json_schema is a class has no snapshot; give the schema itself as a dict.")
    return changed


def vocab_hash(vocab: native.Vocab) -> bytes:
    """Name a vocabulary by the text of its every token. Takes about a microsecond a token: keep it."""
    digest = hashlib.sha256()
    for token in range(vocab.n_tokens):
        piece = vocab.token_to_bytes(token, special=True)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.digest()
