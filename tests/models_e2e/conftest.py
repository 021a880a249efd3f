"""The real models as fixtures, under the names that the tests of tests/e2e ask for.

KVASIR_TEST_MODEL names the one model to test; without it every model of the table is. A model is fetched and opened
by the first test that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir
from kvasir.errors import KvasirError
from kvasir.model.store import resolve
from tests.models_e2e.fetch import CannotFetch, fetched
from tests.models_e2e.table import MODELS, RealModel


def chosen() -> tuple[RealModel, ...]:
    """The models of this run; of one that a path names nothing is known but that it runs."""
    if given := os.environ.get("KVASIR_TEST_MODEL"):
        return (RealModel(name="given", reference=given, sha256="", near_is_near=False),)
    return MODELS


@pytest.fixture(scope="session", params=chosen(), ids=str)
def real_model(request: pytest.FixtureRequest) -> RealModel:
    """A line of the table."""
    model: RealModel = request.param
    return model


@pytest.fixture(scope="session")
def real_path(real_model: RealModel) -> Path:
    """The model's file; a model that cannot be had fails the tests that need it."""
    try:
        return fetched(real_model) if real_model.sha256 else resolve(real_model.reference)
    except (CannotFetch, KvasirError) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def any_path(real_path: Path) -> Path:
    """Where tests/e2e also tries a tiny model, there are only real ones here."""
    return real_path


@pytest.fixture(scope="session")
def is_default(real_model: RealModel) -> bool:
    """Whether the model must know where Paris is."""
    return real_model.knows == "Paris"


@pytest.fixture(scope="module")
def model(real_path: Path) -> Iterator[kvasir.Model]:
    """The model with a small context."""
    with kvasir.load(real_path, context_size=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(model: kvasir.Model) -> kvasir.Model:
    """The same; there are only real models here."""
    return model
