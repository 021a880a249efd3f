"""Fixtures that every test may use: the tiny models, written once per run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import write_lora, write_model

# A shell that starts the tests in the background ignores Ctrl-C for them and for every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep every KV row that tests leave behind out of the user's cache, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVASIR_CACHE_DIR", str(tmp_path_factory.mktemp("kv")))
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_llama(model_dir: Path) -> Path:
    """A model with plain attention, 2,048 tokens of context and a byte-level vocabulary."""
    return write_model("llama", model_dir / "llama.gguf")


@pytest.fixture(scope="session")
def tiny_gemma3(model_dir: Path) -> Path:
    """A model whose every second layer sees a window of 32 tokens."""
    return write_model("gemma3", model_dir / "gemma3.gguf")


@pytest.fixture(scope="session")
def tiny_mamba(model_dir: Path) -> Path:
    """A recurrent model."""
    return write_model("mamba", model_dir / "mamba.gguf")


@pytest.fixture(scope="session")
def tiny_lfm2(model_dir: Path) -> Path:
    """A hybrid model: attention and recurrent layers."""
    return write_model("lfm2", model_dir / "lfm2.gguf")


@pytest.fixture(scope="session")
def tiny_bert(model_dir: Path) -> Path:
    """An encoder for embeddings, mean pooling."""
    return write_model("bert", model_dir / "bert.gguf")


@pytest.fixture(scope="session")
def tiny_rank(model_dir: Path) -> Path:
    """An encoder that ranks: one score per text."""
    return write_model("rank", model_dir / "rank.gguf")


@pytest.fixture(scope="session")
def tiny_lora(model_dir: Path) -> Path:
    """A LoRA adapter for `tiny_llama`."""
    return write_lora(model_dir / "lora.gguf")
