"""The models of every kind of memory, and a folder for their rows."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from tests.cache_real.rig import Place
from tests.models import write_model

KINDS = ("llama", "gemma3", "mamba", "lfm2")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A name of a tiny model: plain attention, a window of 32 tokens, a recurrent state, a hybrid."""
    return str(request.param)


@pytest.fixture
def path(kind: str, request: pytest.FixtureRequest) -> Path:
    """The tiny model of this kind."""
    found: Path = request.getfixturevalue(f"tiny_{kind}")
    return found


@pytest.fixture(scope="session")
def other_llama(model_dir: Path) -> Path:
    """A model that differs from `tiny_llama` in its weights alone."""
    return write_model("llama", model_dir / "other_llama.gguf", seed=2)


@pytest.fixture(scope="session")
def long_llama(model_dir: Path) -> Path:
    """A tiny llama with 8,192 tokens of context."""

    def lengthen(keys: gguf.GGUFWriter) -> None:
        del keys.kv_data[0]["llama.context_length"]
        keys.add_context_length(8192)

    return write_model("llama", model_dir / "long_llama.gguf", edit=lengthen)
