"""Print what the development environment needs, one requirement a line: the project's own and its `dev` extra.

The Makefile installs these before the project itself, so that the project's build can use them and pip resolves once.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
print("\n".join([*project["dependencies"], *project["optional-dependencies"]["dev"]]))
