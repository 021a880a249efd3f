"""Keys are the formula, exactly, and one pass gives all boundaries."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.cache import Space
from kvasir.cache.key import pack, unpack
from kvasir.errors import BadOption
from tests.unit.cache.rig import space

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(tokens_of, st.integers(0, 255), st.integers(0, 255), st.binary(min_size=32, max_size=32))
def test_a_key_is_the_hash_of_space_and_tokens(tokens: list[int], k: int, v: int, context: bytes) -> None:
    fingerprint = hashlib.sha256(b"weights").digest()
    plain = fingerprint + bytes([k]) + bytes([v]) + context + b"".join(struct.pack("<I", token) for token in tokens)
    assert Space(fingerprint, k, v, context).key(tokens) == hashlib.sha256(plain).digest()


@given(tokens_of, st.integers(1, 50))
def test_boundaries_are_the_keys_of_every_full_block(tokens: list[int], block: int) -> None:
    here = space()
    wanted = [here.key(tokens[:end]) for end in range(block, len(tokens) + 1, block)]
    assert here.boundaries(tokens, block) == wanted


@given(tokens_of)
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert list(unpack(pack(tokens))) == tokens
    assert pack(array("I", tokens)) == pack(tokens)


@given(tokens_of, tokens_of)
def test_other_tokens_or_another_space_make_another_key(one: list[int], other: list[int]) -> None:
    here = space()
    assert (here.key(one) == here.key(other)) == (one == other)
    assert here.key(one) != space("another model").key(one)


def test_the_root_is_the_key_of_no_tokens() -> None:
    assert space().root == space().key(())
    assert Space.of_head(space().head) == space()


@pytest.mark.parametrize(
    "bad", [(b"short", 1, 1, b"c" * 32), (b"f" * 32, 256, 1, b"c" * 32), (b"f" * 32, 1, -1, b"c" * 32)]
)
def test_a_space_that_would_shift_the_formula_is_refused(bad: tuple[bytes, int, int, bytes]) -> None:
    with pytest.raises(BadOption):
        Space(*bad)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"]])
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(BadOption):
        space().key(tokens)
