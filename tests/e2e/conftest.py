"""The models that end-to-end tests run on, all with the real core.

Mechanics run on a tiny model of random weights, in every test run. What needs sense runs on the default model, or on
the one that KVASIR_TEST_MODEL names, under `make test-models`. That may be any GGUF; what it is not made for is left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir
from tests.models_e2e.fetch import chatting, file_of, writing
from tests.models_e2e.table import RealModel, chosen


@pytest.fixture(scope="session", params=["tiny", pytest.param("real", marks=pytest.mark.models)], ids=["tiny", "real"])
def any_path(request: pytest.FixtureRequest) -> Path:
    """The tiny model, and under `make test-models` the real one too."""
    path: Path = request.getfixturevalue("tiny_llama" if request.param == "tiny" else "real_path")
    return path


@pytest.fixture(scope="session")
def chat_path(any_path: Path) -> Path:
    """The same, where it brings a chat template."""
    return chatting(any_path)


@pytest.fixture(scope="session")
def real_model() -> RealModel:
    """What is known of the default model, or of the one KVASIR_TEST_MODEL names."""
    return chosen()[0]


@pytest.fixture(scope="session")
def real_path(real_model: RealModel) -> Path:
    """Its file."""
    return writing(file_of(real_model))


@pytest.fixture(scope="session")
def is_default(real_model: RealModel) -> bool:
    """Whether the real model is the default one, whose answers are known."""
    return real_model.reference == "smollm2"


@pytest.fixture(scope="module")
def model(any_path: Path) -> Iterator[kvasir.Model]:
    with kvasir.load(any_path, context_size=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(real_path: Path) -> Iterator[kvasir.Model]:
    with kvasir.load(real_path, context_size=1024) as opened:
        yield opened


@pytest.fixture
def sensible(real: kvasir.Model, real_model: RealModel) -> kvasir.Model:
    """The same, where it is known to make sense."""
    if not real_model.makes_sense:
        pytest.skip("nothing is known of the sense that this model makes")
    return real
