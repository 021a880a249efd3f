"""A text that was made of certain tokens is those tokens when it comes back."""

from __future__ import annotations

from typing import cast

import pytest

from kvasir import native
from kvasir.model.recall import Recall
from kvasir.model.tokenizer import Tokenizer
from kvasir.native import fake


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(cast(native.Vocab, fake.Model.load("fake:plain").vocab))


def odd(text: str) -> list[int]:
    """Single bytes, which is not how the vocabulary splits a text with ' the' or 'ing' in it."""
    return list(text.encode())


def test_the_longest_remembered_beginning_is_taken_as_it_was_made(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer)
    first, second = "in the beginning", "in the beginning was the thing"
    assert tokenizer.encode_prompt(first) != odd(first)
    recall.remember(first, odd(first))
    recall.remember(second, odd(second))
    rest = " and the end"
    assert recall.encode(second + rest) == odd(second) + tokenizer.encode(rest, add_special=False)
    assert recall.encode(first + rest) == odd(first) + tokenizer.encode(rest, add_special=False)
    assert recall.encode(first) == odd(first)


def test_a_text_that_splits_as_it_was_made_keeps_its_natural_boundary(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer)
    recall.remember("in th", tokenizer.encode_prompt("in th"))
    whole = tokenizer.encode_prompt("in the house")
    assert recall.encode("in the house") in (whole, [*tokenizer.encode_prompt("in th"), *tokenizer.encode("e house")])


def test_scopes_do_not_share_texts(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer)
    recall.remember("the thing", odd("the thing"), scope="a")
    assert recall.encode("the thing", scope="b") == tokenizer.encode_prompt("the thing")
    assert recall.encode("the thing", scope="a") == odd("the thing")


def test_the_oldest_texts_are_forgotten(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer, max_texts=2)
    for text in ("the one", "the other", "the third thing"):
        recall.remember(text, odd(text))
    assert recall.encode("the one") == tokenizer.encode_prompt("the one")
    assert recall.encode("the third thing") == odd("the third thing")
    assert len(recall._lengths) == 2


def test_characters_of_several_bytes_are_no_trouble(tokenizer: Tokenizer) -> None:
    recall = Recall(tokenizer)
    recall.remember("the 🦙 thing", odd("the 🦙 thing"))
    assert recall.encode("the 🦙 thing 🙂") == odd("the 🦙 thing") + tokenizer.encode(" 🙂", add_special=False)
