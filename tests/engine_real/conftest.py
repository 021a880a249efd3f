"""The models, the types of V and the layouts that every test here runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_real.subject import Subject
from tests.engine_real.trial import Bench, Trial
from tests.models_e2e.fetch import file_of, plain
from tests.models_e2e.table import chosen


@pytest.fixture(params=["unified", "split"])
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of the KV memory."""
    return str(request.param)


@pytest.fixture(scope="session", params=["f16", "bf16"])
def type_v(request: pytest.FixtureRequest) -> str:
    """The type of V in the KV memory."""
    return str(request.param)


@pytest.fixture(scope="session")
def real_path() -> Path:
    """The default model, or the one KVASIR_TEST_MODEL names."""
    return plain(file_of(chosen()[0]))


@pytest.fixture(scope="session", params=["tiny", pytest.param("real", marks=pytest.mark.models)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """The tiny model with plain attention, and under `make test-models` the real one too."""
    path: Path = request.getfixturevalue("tiny_llama" if request.param == "tiny" else "real_path")
    return Subject(request.param, path)


@pytest.fixture(scope="session")
def tiny(tiny_llama: Path) -> Subject:
    """The tiny model alone, for what a trained one would show no better."""
    return Subject("tiny", tiny_llama)


@pytest.fixture(scope="session", params=["gemma3", "mamba", "lfm2"])
def odd(request: pytest.FixtureRequest) -> Subject:
    """A model whose memory cannot be cut everywhere: a window, a recurrent state, both kinds of layers."""
    return Subject(request.param, request.getfixturevalue(f"tiny_{request.param}"))


@pytest.fixture(scope="session")
def bench(subject: Subject, type_v: str) -> Bench:
    """A model with its noise measured."""
    return Bench.of(subject, type_v)


@pytest.fixture
def trial(bench: Bench, layout: str) -> Trial:
    """What a test of equality runs on."""
    return Trial(bench, layout)


@pytest.fixture(scope="session")
def odd_bench(odd: Subject, type_v: str) -> Bench:
    """An odd model with its noise measured."""
    return Bench.of(odd, type_v)


@pytest.fixture
def odd_trial(odd_bench: Bench, layout: str) -> Trial:
    """What a test of a memory that cannot be cut runs on."""
    return Trial(odd_bench, layout)
