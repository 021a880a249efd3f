"""The fingerprint names what makes KV differ, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from kvasir.model.fingerprint import FingerprintMode, context_hash, file_hash, fingerprint

W = b"w" * 32
A = b"a" * 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 << 20))
    return path


def test_safe_is_the_hash_of_the_file_and_is_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "home" / "fingerprints.json"
    first = file_hash(model, FingerprintMode.SAFE, memory)
    assert first == hashlib.sha256(model.read_bytes()).digest()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("the file was hashed again"))
    assert file_hash(model, FingerprintMode.SAFE, memory) == first


def test_a_changed_file_is_hashed_again(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "fingerprints.json"
    before = file_hash(model, FingerprintMode.SAFE, memory)
    data = bytearray(model.read_bytes())
    data[12345] ^= 1
    model.write_bytes(data)
    os.utime(model, ns=(1, model.stat().st_mtime_ns + 1))
    assert file_hash(model, FingerprintMode.SAFE, memory) != before


@pytest.mark.parametrize("junk", [b"", b"{", b"[1]", b'{"x": "zz"}', b'{"x": 3}', b"\xff"])
def test_a_broken_memory_remembers_nothing(model: Path, tmp_path: Path, junk: bytes) -> None:
    memory = tmp_path / "fingerprints.json"
    memory.write_bytes(junk)
    digest = file_hash(model, FingerprintMode.SAFE, memory)
    assert digest == hashlib.sha256(model.read_bytes()).digest()
    assert digest.hex() in json.loads(memory.read_text()).values()


def test_chunked_sees_the_ends_and_the_size(model: Path) -> None:
    before = file_hash(model, FingerprintMode.CHUNKED)
    for at in (0, model.stat().st_size - 1):
        data = bytearray(model.read_bytes())
        data[at] ^= 1
        model.write_bytes(data)
        after = file_hash(model, FingerprintMode.CHUNKED)
        assert after != before
        before = after
    with model.open("ab") as file:
        file.write(b"x")
    assert file_hash(model, FingerprintMode.CHUNKED) != before


def test_fast_unsafe_reads_nothing(model: Path) -> None:
    before = file_hash(model, FingerprintMode.FAST_UNSAFE)
    facts = model.stat()
    model.write_bytes(os.urandom(facts.st_size))
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert file_hash(model, FingerprintMode.FAST_UNSAFE) == before


def test_everything_that_makes_kv_differ_makes_the_name_differ() -> None:
    names = [
        fingerprint(W),
        fingerprint(A),
        fingerprint(W, scope=""),
        fingerprint(W, scope="a"),
        fingerprint(W, scope="b"),
        fingerprint(W, build="1"),
        fingerprint(W, build="1", scope="a"),
        fingerprint(W, adapters=[(A, 1.0)]),
        fingerprint(W, adapters=[(A, 0.5)]),
        fingerprint(W, adapters=[(A, 1.0), (W, 1.0)]),
    ]
    assert len(set(names)) == len(names)
    assert all(len(name) == 32 for name in names)
    assert fingerprint(W, adapters=[(A, 1.0), (W, 2.0)]) == fingerprint(W, adapters=[(W, 2.0), (A, 1.0)])


def test_the_context_hash_depends_on_values_not_on_their_order() -> None:
    assert context_hash({"a": 1, "b": 2.5}) == context_hash({"b": 2.5, "a": 1})
    assert context_hash({"a": 1}) != context_hash({"a": 2})
