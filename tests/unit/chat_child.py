"""`kvasir` on the fake core, for tests that need a process of their own. `STEP_DELAY_S` makes its replies slow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kvasir
from kvasir.cli import run
from kvasir.cli.main import main
from kvasir.config import load_settings
from kvasir.native import fake
from kvasir.native.fake_context import Context
from kvasir.service.model import Model


class SlowContext(Context):
    """A context whose every step takes a while."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.step_delay_s = float(os.environ.get("STEP_DELAY_S", "0"))


def _load(path: Path, *, progress: Any = None, **options: Any) -> Model:
    return Model.open(path, load_settings(options), core=fake)


fake.Context = SlowContext  # type: ignore[misc]
kvasir.load = _load  # type: ignore[assignment]
setattr(run, "resolve", lambda *args, **more: Path("fake:plain"))  # noqa: B010

if __name__ == "__main__":
    main()
