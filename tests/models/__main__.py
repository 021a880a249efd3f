"""Write every tiny model and the adapter into a folder: `python -m tests.models FOLDER`, for the native tests."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.models import WRITERS, write_lora, write_model


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in WRITERS:
        write_model(name, folder / f"{name}.gguf")
    write_lora(folder / "lora.gguf")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
