"""The one fixture of the contract: `core`, once fake and once real."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.contract.core import KINDS, Core


@pytest.fixture(scope="session", params=["fake", "real"])
def core(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    tiny_gemma3: Path,
    tiny_mamba: Path,
    tiny_lfm2: Path,
    tiny_bert: Path,
    tiny_rank: Path,
    tiny_lora: Path,
) -> Core:
    """A core with a model of each kind. Every test that takes it runs on both."""
    if request.param == "fake":
        names = (*KINDS, "embed", "rank", "lora")
        return Core("fake", importlib.import_module("kvasir.native.fake"), {name: f"fake:{name}" for name in names})
    files = {
        "plain": tiny_llama, "window": tiny_gemma3, "recurrent": tiny_mamba, "hybrid": tiny_lfm2,
        "embed": tiny_bert, "rank": tiny_rank, "lora": tiny_lora,
    }  # fmt: skip
    return Core("real", importlib.import_module("kvasir.native"), {name: str(path) for name, path in files.items()})


@pytest.fixture(params=[True, False], ids=["unified", "split"])
def unified(request: pytest.FixtureRequest) -> bool:
    """The layout of the KV memory."""
    return bool(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of memory a model has."""
    return str(request.param)
