"""What models and vocabularies say of themselves, and text to tokens and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import BadOption, TokenizeFailed
from tests.contract.core import KINDS, Core


def test_every_kind_of_memory_is_told_apart(core: Core, kind: str) -> None:
    model = core.model(kind)
    assert model.memory_kind == kind
    assert model.n_swa == (32 if kind == "window" else 0)
    assert core.context(kind).memory.kind == kind


@pytest.mark.parametrize("kind", ["embed", "rank"])
def test_encoders_have_no_memory(core: Core, kind: str) -> None:
    assert core.model(kind).memory_kind == "none"


@pytest.mark.parametrize("kind", [*KINDS, "embed", "rank"])
def test_a_model_knows_its_facts(core: Core, kind: str) -> None:
    model = core.model(kind)
    assert model.description
    assert model.architecture == model.metadata["general.architecture"]
    assert model.file_type
    assert min(model.n_params, model.n_bytes, model.n_ctx_train, model.n_embd, model.n_embd_out, model.n_layer) > 0
    assert min(model.n_head, model.n_head_kv) >= 0
    assert model.rope_type in ("none", "norm", "neox", "mrope", "imrope", "vision")
    assert isinstance(model.has_encoder, bool)
    assert isinstance(model.has_decoder, bool)
    assert not model.is_diffusion
    assert not model.vocab_only
    assert not model.closed


def test_a_ranking_model_says_how_many_scores_it_gives(core: Core) -> None:
    assert core.model("rank").n_cls_out == 1


def test_the_chat_template_is_there_and_others_are_not(core: Core) -> None:
    model = core.model()
    assert "<|im_start|>" in model.chat_template()
    assert model.chat_template("no such template") is None


def test_special_tokens_are_known(core: Core) -> None:
    vocab = core.model().vocab
    assert vocab.kind == "bpe"
    assert vocab.text(vocab.eos) == "<|endoftext|>"
    assert vocab.bos == vocab.eos
    assert vocab.text(vocab.eot) == "<|im_end|>"
    assert vocab.nl == 10
    for name in ("sep", "pad", "mask", "fim_pre", "fim_suf", "fim_mid"):
        assert getattr(vocab, name) is None
    assert not vocab.add_bos
    assert not vocab.add_eos


def test_end_tokens_are_those_that_end_a_generation(core: Core) -> None:
    vocab = core.model().vocab
    assert vocab.eog_tokens == [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]
    assert vocab.eos in vocab.eog_tokens
    assert vocab.eot in vocab.eog_tokens
    assert vocab.is_control(vocab.eos)
    assert not vocab.is_control(97)
    assert isinstance(vocab.score(97), float)


TEXTS = [
    "",
    "a",
    "hello the world",
    "  spaces  ",
    "line\nline\r\n\ttab",
    "héllo",
    "🙂🙂",
    "日本語",
    "a\0b",
    "ing the he",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(core: Core, text: str) -> None:
    vocab = core.model().vocab
    assert vocab.detokenize(vocab.tokenize(text)) == text.encode()
    assert b"".join(map(vocab.token_to_bytes, vocab.tokenize(text))) == text.encode()
    assert vocab.tokenize(text.encode()) == vocab.tokenize(text)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_survives_the_round_trip(core: Core, text: str) -> None:
    vocab = core.model().vocab
    assert vocab.detokenize(vocab.tokenize(text)) == text.encode()


def test_an_emoji_is_four_tokens(core: Core) -> None:
    assert core.tokens("🙂") == list("🙂".encode())


def test_special_text_is_parsed_only_when_asked(core: Core) -> None:
    vocab = core.model().vocab
    text = "<|im_start|>hi<|im_end|>"
    parsed = vocab.tokenize(text, parse_special=True)
    assert parsed[0] != vocab.tokenize(text)[0]
    assert parsed[-1] == vocab.eot
    assert vocab.detokenize(parsed) == b"hi"
    assert vocab.detokenize(parsed, unparse_special=True) == text.encode()
    assert vocab.detokenize(vocab.tokenize(text)) == text.encode()


def test_special_tokens_are_shown_only_when_asked(core: Core) -> None:
    vocab = core.model().vocab
    assert vocab.token_to_bytes(vocab.eos) == b""
    assert vocab.token_to_bytes(vocab.eos, special=True) == b"<|endoftext|>"


@pytest.mark.parametrize("text", [b"\xff\xfe", b"cut \xf0\x9f\x99", "lone \ud800"])
def test_text_that_is_not_utf8_is_refused(core: Core, text: str | bytes) -> None:
    with pytest.raises(TokenizeFailed):
        core.model().vocab.tokenize(text)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_tokens_that_do_not_exist_are_refused(core: Core, token: int) -> None:
    vocab = core.model().vocab
    for use in (vocab.token_to_bytes, vocab.text, vocab.score, vocab.is_eog, vocab.is_control):
        with pytest.raises(BadOption):
            use(token)
    with pytest.raises(BadOption):
        vocab.detokenize([97, token])
