"""docs/sessions.md is one program: its Python blocks run in order, on the tiny model and on the real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "sessions.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_guide_runs(any_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == 8
    monkeypatch.setenv("KVASIR_THREADS", "1")
    names: dict[str, Any] = {"path": str(any_path)}
    for i, block in enumerate(BLOCKS):
        exec(compile(block.replace('"smollm2"', "path"), f"docs/sessions.md block {i}", "exec"), names)
    assert names["service"].closed
    assert names["runtime"].closed
