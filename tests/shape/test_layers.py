"""The import rules that the layers contract cannot say: what the server may not see, and what stands on nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "kvasir"
BELOW_SERVICE = ("kvasir.engine", "kvasir.cache", "kvasir.model", "kvasir.native")


def imported(path: Path) -> Iterator[str]:
    """Names of the modules a file imports, function-level imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(folder: Path) -> list[str]:
    return [
        f"{path.name}: {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in imported(path)
        if any(name == layer or name.startswith(f"{layer}.") for layer in BELOW_SERVICE)
    ]


def test_the_server_knows_no_engine_cache_model_or_native() -> None:
    assert forbidden_imports(PACKAGE / "server") == []


@pytest.mark.parametrize(
    "line", ["import kvasir.engine", "from kvasir import native", "from kvasir.cache.keys import Key"]
)
def test_the_rule_would_notice(tmp_path: Path, line: str) -> None:
    (tmp_path / "routes.py").write_text(f"def route():\n    {line}\n")
    assert len(forbidden_imports(tmp_path)) == 1


@pytest.mark.parametrize("name", ["errors", "types"])
def test_errors_and_types_stand_on_the_standard_library_alone(name: str) -> None:
    tops = {module.partition(".")[0] for module in imported(PACKAGE / f"{name}.py")}
    assert tops <= sys.stdlib_module_names | {"kvasir"}
