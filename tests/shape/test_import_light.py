"""`import kvasir` is cheap: no server, hub, terminal or numeric library, and no native code."""

from __future__ import annotations

import subprocess
import sys

HEAVY = [
    "typer",
    "rich",
    "prompt_toolkit",
    "huggingface_hub",
    "pydantic",
    "numpy",
    "msgspec",
    "psutil",
    "asyncio",
    "kvasir.native",
    "kvasir.engine",
]


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_kvasir_loads_nothing_heavy() -> None:
    assert not loaded_by("import kvasir").intersection(HEAVY)


def test_the_service_needs_no_terminal_or_hub_library() -> None:
    loaded = loaded_by("import kvasir; kvasir.load")
    assert "kvasir.engine" in loaded
    assert not loaded.intersection(["typer", "rich", "huggingface_hub", "pydantic"])
