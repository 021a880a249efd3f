"""The real models as fixtures, under the names that the tests of tests/e2e ask for.

KVASIR_TEST_MODEL names the one model to test; without it every model of the table is. A model is fetched and opened
by the first test that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir
from tests.models_e2e.fetch import file_of, writing
from tests.models_e2e.table import RealModel, chosen


@pytest.fixture(scope="session", params=chosen(), ids=str)
def real_model(request: pytest.FixtureRequest) -> RealModel:
    """A line of the table."""
    model: RealModel = request.param
    return model


@pytest.fixture(scope="session")
def real_file(real_model: RealModel) -> Path:
    """The model's file, an encoder's too."""
    return file_of(real_model)


@pytest.fixture(scope="session")
def real_path(real_file: Path) -> Path:
    """The file of a model that writes text."""
    return writing(real_file)


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


@pytest.fixture
def sensible(model: kvasir.Model, real_model: RealModel) -> kvasir.Model:
    """The same, where it is known to make sense."""
    if not real_model.makes_sense:
        pytest.skip("nothing is known of the sense that this model makes")
    return model
