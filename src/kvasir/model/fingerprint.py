"""The fingerprint: 32 bytes that name everything that makes one model's KV differ from another's.

Owns how a file is hashed and what goes into the name beside it: adapters with their scales, the llama.cpp build, the
scope. A full hash of a large file takes seconds, so it is remembered by path, size and modification time. Says nothing
of KV types, rope or flash attention: those are the context's, and `context_hash` names them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

# Changed when the meaning of a fingerprint changes: old rows are then never found again.
DOMAIN = b"kvasir fingerprint 1"
CHUNK_BYTES = 1 << 20
# Sixteen chunks over the whole file: a fine-tune changes tensors everywhere, so that a sample meets the change.
N_CHUNKS = 16
MAX_REMEMBERED = 512


class FingerprintMode(StrEnum):
    """How sure to be that a file is the file it was.

    `safe` hashes all of it, once. `chunked` hashes its header and sixteen chunks. `fast_unsafe` trusts path, size and
    modification time, so that a file replaced within a second by one of equal size is taken for the old one.
    """

    SAFE = "safe"
    CHUNKED = "chunked"
    FAST_UNSAFE = "fast_unsafe"


def file_hash(path: Path, mode: FingerprintMode, memory: Path | None = None) -> bytes:
    """Hash a file as `mode` says. `memory` is a file that remembers full hashes; it may be lost at any time."""
    if mode is FingerprintMode.FAST_UNSAFE:
        return hashlib.sha256(_identity(path).encode()).digest()
    if mode is FingerprintMode.CHUNKED:
        return _chunked_hash(path)
    identity = _identity(path)
    known = _recall(memory)
    if identity in known:
        return bytes.fromhex(known[identity])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    # Not remembered if it changed meanwhile: the hash would be of neither file.
    if memory is not None and _identity(path) == identity:
        _remember(memory, known | {identity: digest.hex()})
    return digest


def fingerprint(
    weights: bytes, *, adapters: Iterable[tuple[bytes, float]] = (), build: str = "", scope: str | None = None
) -> bytes:
    """Name weights with adapters (hash and scale each) as one llama.cpp build computes with them, for one scope."""
    name = hashlib.sha256(DOMAIN)
    name.update(weights)
    for adapter, scale in sorted(adapters):
        name.update(b"adapter" + adapter + struct.pack("<d", scale))
    for label, text in ((b"build", build), (b"scope", scope)):
        if text is not None:
            encoded = text.encode()
            name.update(label + struct.pack("<I", len(encoded)) + encoded)
    return name.digest()


def context_hash(facts: Mapping[str, Any]) -> bytes:
    """Hash the settings that change KV without changing its types: rope, flash attention, a full sliding window.

    Never the size of the context, slots, batch or layout: a row saved under one restores under another.
    """
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, separators=(",", ":")).encode()).digest()


def _identity(path: Path) -> str:
    real = path.resolve()
    facts = real.stat()
    return f"{real}|{facts.st_size}|{facts.st_mtime_ns}"


def _chunked_hash(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(b"chunked" + struct.pack("<Q", size))
    with path.open("rb") as file:
        for i in range(N_CHUNKS):
            file.seek(max(0, (size - CHUNK_BYTES) * i // (N_CHUNKS - 1)))
            digest.update(file.read(CHUNK_BYTES))
    return digest.digest()


def _recall(memory: Path | None) -> dict[str, str]:
    """Read what is remembered; a broken or missing file remembers nothing."""
    if memory is None:
        return {}
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        return {str(key): str(value) for key, value in known.items() if len(bytes.fromhex(value)) == 32}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(memory: Path, known: dict[str, str]) -> None:
    """Write it back whole; losing a race or a disk costs a hash the next time, nothing else."""
    newest = dict(list(known.items())[-MAX_REMEMBERED:])
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        handle, temp = tempfile.mkstemp(dir=memory.parent, prefix=memory.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(newest, file)
        Path(temp).replace(memory)
