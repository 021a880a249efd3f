"""Vectors for texts, in a context of their own."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.errors import BadOption
from tests.contract.core import PROBE, Core

# Token ids that exist in every vocabulary here.
# Attention without a cache sums in F16: values of about 1 move by about 1e-3 with the size of the batch.
NOISE = 1e-2
TEXTS = [[2, 10, 11, 12, 3], [2, 20, 3], [2, *range(5, 60), 3]]


def test_an_embedding_model_gives_one_vector_per_text(core: Core) -> None:
    context = core.context("embed", embeddings=True)
    vectors = context.embed(TEXTS)
    assert vectors.shape == (3, core.model("embed").n_embd_out)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    assert context.pooling == "mean"


@pytest.mark.parametrize("n_seq_max", [1, 2, 4])
def test_texts_embedded_together_are_as_if_embedded_alone(core: Core, n_seq_max: int) -> None:
    context = core.context("embed", embeddings=True, n_seq_max=n_seq_max)
    together = context.embed(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.allclose(context.embed([text])[0], vector, atol=NOISE)


def test_more_texts_than_sequences_or_batch_keep_their_order(core: Core) -> None:
    context = core.context("embed", embeddings=True, n_batch=64, n_ubatch=64)
    many = [[2, 5 + i % 50, 6 + i % 40, 3] for i in range(40)]
    vectors = context.embed(many)
    assert vectors.shape[0] == 40
    for i in (0, 17, 39):
        assert np.allclose(context.embed([many[i]])[0], vectors[i], atol=NOISE)


def test_different_texts_have_different_vectors(core: Core) -> None:
    vectors = core.context("embed", embeddings=True).embed(TEXTS)
    assert not np.allclose(vectors[0], vectors[1])


def test_no_texts_give_no_vectors(core: Core) -> None:
    assert core.context("embed", embeddings=True).embed([]).shape == (0, core.model("embed").n_embd_out)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_every_pooling_gives_a_vector(core: Core, pooling: str) -> None:
    context = core.context("embed", embeddings=True, pooling=pooling)
    assert context.pooling == pooling
    assert context.embed(TEXTS).shape == (3, core.model("embed").n_embd_out)


@pytest.mark.parametrize("kind", ["embed", "plain"])
def test_without_pooling_there_is_one_vector_per_token(core: Core, kind: str) -> None:
    context = core.context(kind, embeddings=True, pooling="none")
    assert context.pooling == "none"
    assert context.embed_tokens(TEXTS[0]).shape == (5, core.model(kind).n_embd_out)
    with pytest.raises(BadOption):
        context.embed(TEXTS)


def test_with_pooling_there_are_no_token_vectors(core: Core) -> None:
    with pytest.raises(BadOption):
        core.context("embed", embeddings=True).embed_tokens(TEXTS[0])


def test_a_ranking_model_gives_one_score_per_text(core: Core) -> None:
    context = core.context("rank", embeddings=True)
    assert context.pooling == "rank"
    scores = context.embed(TEXTS)
    assert scores.shape == (3, 1)
    assert len(set(scores[:, 0].tolist())) == 3


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_generating_model_can_embed_too(core: Core, kind: str, pooling: str) -> None:
    context = core.context(kind, embeddings=True, pooling=pooling)
    together = context.embed(TEXTS)
    assert together.shape == (3, core.model(kind).n_embd_out)
    assert np.allclose(context.embed([TEXTS[1]])[0], together[1], atol=NOISE)


def test_every_embedded_token_is_counted(core: Core) -> None:
    context = core.context("embed", embeddings=True)
    context.embed(TEXTS)
    assert context.n_rows_decoded == sum(map(len, TEXTS))


@pytest.mark.parametrize("texts", [[[]], [[2, 3], []], [[-1]], [[1 << 20]], [[5] * 513]])
def test_texts_that_cannot_be_embedded_are_refused(core: Core, texts: list[list[int]]) -> None:
    with pytest.raises(BadOption):
        core.context("embed", embeddings=True).embed(texts)


def test_a_context_that_embeds_does_not_generate_and_the_other_way_round(core: Core) -> None:
    with pytest.raises(BadOption):
        core.context("plain", embeddings=True, pooling="mean").step([core.row(0, 0, [PROBE])])
    with pytest.raises(BadOption):
        core.context("plain").embed([[PROBE]])
    with pytest.raises(BadOption):
        core.context("plain").embed_tokens([PROBE])
