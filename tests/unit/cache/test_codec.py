"""The row format: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.cache import Reason
from kvasir.cache.codec import (
    VERSION,
    Damaged,
    OtherVersion,
    check_name,
    check_part,
    decode_header,
    encode_header,
    file_bytes,
    header_bytes,
)
from kvasir.cache.key import pack
from kvasir.cache.row import RowName
from tests.unit.cache.rig import space

spans_of = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)
parts_of = st.dictionaries(st.sampled_from(["base", "window", "state"]), st.binary(max_size=300), max_size=3)


def whole_file(tokens: list[int], n_before: int, parts: dict[str, bytes], reason: Reason) -> tuple[RowName, bytes]:
    before = list(range(n_before))
    end = n_before + len(tokens)
    name = RowName(space().root, space().key(before + tokens), space().key(before), n_before, end)
    return name, encode_header(name, space(), pack(tokens), parts, reason, 123) + b"".join(parts.values())


@given(spans_of, st.integers(0, 40), parts_of, st.sampled_from(list(Reason)))
def test_a_row_survives_the_format(tokens: list[int], n_before: int, parts: dict[str, bytes], reason: Reason) -> None:
    name, data = whole_file(tokens, n_before, parts, reason)
    assert len(data) == file_bytes(len(tokens), parts)
    header = decode_header(data, file_size=len(data))
    check_name(header, name)
    assert (header.name, header.space, header.reason, header.created_s) == (name, space(), reason, 123)
    assert header.tokens == pack(tokens)
    assert header.sizes == {part: len(content) for part, content in parts.items()}
    for part, entry in header.parts.items():
        content = data[entry.offset : entry.offset + entry.n_bytes]
        check_part(content, entry)
        assert content == parts[part]


@settings(max_examples=300)
@given(spans_of, st.integers(0, 40), parts_of, st.data())
def test_a_flipped_bit_is_always_caught(
    tokens: list[int], n_before: int, parts: dict[str, bytes], data: st.DataObject
) -> None:
    name, good = whole_file(tokens, n_before, parts, Reason.COLD)
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        read_whole(name, bytes(bad))


@given(spans_of, parts_of, st.data())
def test_a_shorter_or_longer_file_is_caught(tokens: list[int], parts: dict[str, bytes], data: st.DataObject) -> None:
    name, good = whole_file(tokens, 3, parts, Reason.COLD)
    for bad in (good[: data.draw(st.integers(0, len(good) - 1))], good + b"\0"):
        with pytest.raises(Damaged):
            read_whole(name, bad)


@given(spans_of, st.integers(0, 3), parts_of)
def test_a_wrong_name_is_rejected(tokens: list[int], field: int, parts: dict[str, bytes]) -> None:
    name, data = whole_file(tokens, 5, parts, Reason.COLD)
    other = [
        name._replace(key=space().root),
        name._replace(parent=space().root),
        name._replace(space=space("another").root),
        name._replace(start=name.start - 1),
    ][field]
    with pytest.raises(Damaged):
        read_whole(other, data)


def test_tokens_that_do_not_make_the_key_are_rejected() -> None:
    name = RowName(space().root, space().key([1, 2]), space().root, 0, 2)
    data = encode_header(name, space(), pack([1, 3]), {}, Reason.COLD, 0)
    with pytest.raises(Damaged, match="key"):
        read_whole(name, data)


def test_another_version_is_told_from_damage() -> None:
    name, data = whole_file([1, 2], 0, {"base": b"x"}, Reason.COLD)
    with pytest.raises(OtherVersion):
        read_whole(name, data[:4] + bytes([VERSION + 1]) + data[5:])


def test_the_header_is_as_long_as_drawn() -> None:
    assert header_bytes(0, 0) == 156 + 16
    assert header_bytes(2, 10) == 156 + 48 + 40 + 16


def read_whole(name: RowName, data: bytes) -> None:
    header = decode_header(data, file_size=len(data))
    check_name(header, name)
    for entry in header.parts.values():
        check_part(data[entry.offset : entry.offset + entry.n_bytes], entry)
