"""docs/native.md is one program: its Python blocks run in order, on the tiny model and on the real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.models_e2e.fetch import file_of, plain
from tests.models_e2e.table import chosen

GUIDE = Path(__file__).parents[2] / "docs" / "native.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def run_guide(path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"path": str(path)}
    for i, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/native.md block {i}", "exec"), names)
    return names


def test_the_guide_has_its_chapters() -> None:
    assert len(BLOCKS) == 9


def test_the_guide_runs(tiny_llama: Path) -> None:
    names = run_guide(tiny_llama)
    assert 0 < len(names["made"]) <= 16
    assert names["model"].closed
    assert names["context"].closed


def test_the_loop_written_by_hand_makes_the_same_text_again(tiny_llama: Path) -> None:
    assert run_guide(tiny_llama)["made"] == run_guide(tiny_llama)["made"]


@pytest.mark.models
def test_the_guide_runs_on_a_real_model() -> None:
    run_guide(plain(file_of(chosen()[0])))
