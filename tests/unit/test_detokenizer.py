"""Tokens to text: whole characters only, whatever bytes a token holds; bad input is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import BadOption, TokenizeFailed
from kvasir.model.tokenizer import Detokenizer, Tokenizer


class Bytes:
    """A vocabulary whose tokens are the bytes, after a beginning-of-text token."""

    n_tokens = 257
    add_bos = True
    bos = 256

    def tokenize(self, text: bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [self.bos, *text] if add_special else list(text)

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        return (b"<bos>" if special else b"") if token == self.bos else bytes([token])

    def detokenize(self, tokens: list[int], *, unparse_special: bool = False) -> bytes:
        return b"".join(self.token_to_bytes(token, special=unparse_special) for token in tokens)


vocab: Any = Bytes()
tokenizer = Tokenizer(vocab)


@given(st.text())
def test_any_text_comes_out_whole_and_in_order(text: str) -> None:
    detokenizer = Detokenizer(vocab)
    pieces = [detokenizer.feed(token) for token in text.encode()]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert detokenizer.flush() == ""


@given(st.binary())
def test_any_bytes_come_out_as_valid_text(data: bytes) -> None:
    detokenizer = Detokenizer(vocab)
    text = "".join(detokenizer.feed(token) for token in data) + detokenizer.flush()
    assert text == data.decode("utf-8", errors="replace")


def test_an_emoji_over_four_tokens_is_one_piece() -> None:
    detokenizer = Detokenizer(vocab)
    assert [detokenizer.feed(token) for token in "🦙".encode()] == ["", "", "", "🦙"]


def test_a_character_that_never_ends_is_flushed_as_a_replacement() -> None:
    detokenizer = Detokenizer(vocab)
    assert [detokenizer.feed(token) for token in "🦙".encode()[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


@given(st.text())
def test_encode_and_decode_are_inverse(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_shown_on_request_only() -> None:
    assert tokenizer.decode([256, 65]) == "A"
    assert tokenizer.decode([256, 65], special=True) == "<bos>A"


@pytest.mark.parametrize("prompt", ["", b"", [], ()])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(BadOption, match="prompt is empty"):
        tokenizer.encode_prompt(prompt)


@pytest.mark.parametrize("tokens", [[257], [-1], [0, 10**12], [1.5], ["a"], [True], [None]])
def test_what_is_no_token_id_is_named(tokens: Any) -> None:
    with pytest.raises(BadOption, match="token id"):
        tokenizer.encode_prompt(tokens)


@pytest.mark.parametrize("text", ["a\ud800b", b"a\xff", b"\xf0\x9f"])
def test_text_that_is_no_unicode_is_refused(text: Any) -> None:
    with pytest.raises(TokenizeFailed):
        tokenizer.encode_prompt(text)


@pytest.mark.parametrize("prompt", [5, None, 1.5])
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    with pytest.raises(BadOption):
        tokenizer.encode_prompt(prompt)


def test_nul_characters_are_text_like_any_other() -> None:
    assert tokenizer.decode(tokenizer.encode_prompt("a\0b")) == "a\0b"
