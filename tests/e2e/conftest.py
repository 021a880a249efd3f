"""The models that end-to-end tests run on, all with the real core.

Mechanics run on a tiny model of random weights, in every test run. What needs sense runs on the default model, or on
the one that KVASIR_TEST_MODEL names, under `make test-models`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir


@pytest.fixture(scope="session", params=["tiny", pytest.param("real", marks=pytest.mark.models)], ids=["tiny", "real"])
def any_path(request: pytest.FixtureRequest) -> Path:
    """The tiny model, and under `make test-models` the real one too."""
    path: Path = request.getfixturevalue("tiny_llama" if request.param == "tiny" else "real_path")
    return path


@pytest.fixture(scope="session")
def real_path() -> Path:
    """The default model, or the one KVASIR_TEST_MODEL names."""
    from kvasir.model.store import resolve

    return resolve(os.environ.get("KVASIR_TEST_MODEL"))


@pytest.fixture(scope="session")
def is_default() -> bool:
    """Whether the real model is the default one, whose answers are known."""
    return "KVASIR_TEST_MODEL" not in os.environ


@pytest.fixture(scope="module")
def model(any_path: Path) -> Iterator[kvasir.Model]:
    with kvasir.load(any_path, context_size=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(real_path: Path) -> Iterator[kvasir.Model]:
    with kvasir.load(real_path, context_size=1024) as opened:
        yield opened
