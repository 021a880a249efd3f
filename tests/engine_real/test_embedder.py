"""Embeddings and rank scores on real llama.cpp: many texts in a decode equal each alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvasir import native
from kvasir.engine import EngineSettings
from kvasir.engine.core import Core
from kvasir.engine.embedder import Embedder, Vectors
from tests.unit.engine.crowd import GatedCore, together

# Token ids that exist in the encoders' vocabulary, of lengths from 3 to 100.
TEXTS = [[2, *(5 + (7 * i + j * (i + 3)) % 60 for j in range(1 + 3 * i)), 3] for i in range(33)]
CORE = cast(Core, native)
# As in tests/engine_real/noise.py: more shapes are met than were measured.
SLACK = 3.0


@pytest.fixture(params=["bert", "rank"])
def encoder(request: pytest.FixtureRequest, tiny_bert: Path, tiny_rank: Path) -> native.Model:
    return native.Model.load(str(tiny_bert if request.param == "bert" else tiny_rank))


@pytest.fixture
def embedder(encoder: native.Model) -> Iterator[Embedder]:
    made = Embedder(CORE, encoder, EngineSettings(threads=1))
    yield made
    made.close()


def noise_of(model: native.Model) -> float:
    """How far llama.cpp moves a value when the same text comes beside another, or with room for fewer."""
    moved = 0.0
    wide = native.Context(model, n_ctx=512, n_seq_max=8, embeddings=True, threads=1)
    narrow = native.Context(model, n_ctx=512, n_seq_max=1, embeddings=True, threads=1)
    for i in range(0, 32, 4):
        single = narrow.embed([TEXTS[i]])[0]
        for beside in (TEXTS[i + 1], TEXTS[32 - i]):
            moved = max(moved, float(np.abs(wide.embed([beside, TEXTS[i]])[1] - single).max()))
    wide.close()
    narrow.close()
    return moved


def values(embedder: Embedder, texts: list[list[int]], *, ranks: bool) -> Vectors:
    return embedder.rank(texts)[:, None] if ranks else embedder.embed(texts, normalize=None)


def test_many_texts_at_once_equal_each_alone(embedder: Embedder, encoder: native.Model) -> None:
    ranks = encoder.n_cls_out > 0 and encoder.metadata.get("bert.pooling_type") == "4"
    together = values(embedder, TEXTS, ranks=ranks)
    alone = np.concatenate([values(embedder, [text], ranks=ranks) for text in TEXTS])
    noise = noise_of(encoder)
    assert together.shape == alone.shape == (len(TEXTS), 1 if ranks else encoder.n_embd_out)
    assert np.abs(together - alone).max() <= SLACK * noise
    # Texts differ by far more than that, or the comparison would show nothing.
    different = np.abs(together[:, None] - together[None]).max(axis=-1)[~np.eye(len(TEXTS), dtype=bool)]
    assert np.median(different) > 10 * SLACK * noise


def test_eight_callers_need_two_decodes_and_get_what_each_would_get_alone(
    embedder: Embedder, encoder: native.Model
) -> None:
    ranks = encoder.metadata.get("bert.pooling_type") == "4"
    core = GatedCore(native)
    crowded = Embedder(cast(Core, core), encoder, EngineSettings(threads=1))
    got = together(crowded, core, [partial(values, crowded, [text], ranks=ranks) for text in TEXTS[:8]])
    crowded.close()
    assert [len(texts) for texts in core.calls] == [1, 7]
    alone = np.concatenate([values(embedder, [text], ranks=ranks) for text in TEXTS[:8]])
    assert np.abs(np.concatenate(got) - alone).max() <= SLACK * noise_of(encoder)


def test_a_text_is_where_it_was_put(embedder: Embedder, encoder: native.Model) -> None:
    """Another order of the texts gives the same values in that order."""
    ranks = encoder.metadata.get("bert.pooling_type") == "4"
    order = np.random.default_rng(1).permutation(len(TEXTS))
    straight = values(embedder, TEXTS, ranks=ranks)
    shuffled = values(embedder, [TEXTS[i] for i in order], ranks=ranks)
    assert np.abs(shuffled - straight[order]).max() <= SLACK * noise_of(encoder)


def test_the_best_document_is_the_best_however_they_are_ranked(tiny_rank: Path) -> None:
    ranker = Embedder(CORE, native.Model.load(str(tiny_rank)), EngineSettings(threads=1))
    scores = ranker.rank(TEXTS)
    singles = [float(ranker.rank([text])[0]) for text in TEXTS]
    ranker.close()
    assert int(np.argmax(scores)) == int(np.argmax(singles))
