"""Vectors of real models, those of encoders too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType

import kvasir
from kvasir.errors import Unsupported
from tests.e2e.test_python_api import (
    test_embeddings_have_the_documented_shapes as test_embeddings_have_the_documented_shapes,
)
from tests.models_e2e.table import RealModel

# A model's first test may fetch it.
pytestmark = [pytest.mark.models, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def opened(real_file: Path) -> Iterator[kvasir.Model]:
    """The model, whether it writes or not."""
    with kvasir.load(real_file, context_size=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(opened: kvasir.Model) -> kvasir.Model:
    """The same, where it gives vectors."""
    if ranks(opened):
        pytest.skip("this model ranks")
    return opened


def ranks(model: kvasir.Model) -> bool:
    return model.info.metadata.get(f"{model.info.architecture}.pooling_type") == str(int(PoolingType.RANK))


def test_vectors_mean_something(model: kvasir.Model, real_model: RealModel) -> None:
    cat, again, kitten, tax = model.embed(
        ["The cat sleeps.", "The cat sleeps.", "A kitten is asleep.", "Tax law, 1987"]
    )
    assert cat @ again > 0.999
    if real_model.makes_sense:
        assert cat @ kitten > cat @ tax


def test_a_reranker_gives_scores(opened: kvasir.Model) -> None:
    if not ranks(opened):
        pytest.skip("this model does not rank")
    assert np.isfinite(opened.rerank("cat", ["The cat sleeps.", "Tax law, 1987"])).all()


def test_an_encoder_says_that_it_does_not_write(opened: kvasir.Model) -> None:
    if opened.info.has_decoder:
        pytest.skip("this model writes")
    with pytest.raises(Unsupported):
        opened.generate("one")
