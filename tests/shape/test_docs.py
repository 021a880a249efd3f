"""What the documents name exists: files, commands, options, names and settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import kvasir
from kvasir import config, errors
from kvasir.cli.main import app
from kvasir.types import SAMPLING_OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
API = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")

# Modules, and the logger of llama.cpp, that documents may name beside the public names.
MODULES = {
    "errors",
    "native",
    "toml",
    "config",
    "types",
    "engine",
    "service",
    "model",
    "cli",
    "cache",
    "chat",
    "server",
    "llama",
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(page)):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_exist(page: Path) -> None:
    for name in re.findall(r"\bkvasir\.([A-Za-z_]+)", text_of(page)):
        assert name in MODULES or hasattr(kvasir, name), f"kvasir.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for command, rest in re.findall(r"^\s*(?:echo .*\| )?kvasir ([a-z]+)\b(.*)$", text_of(page), re.MULTILINE):
        options = set(re.findall(r"(?<=\s)--[a-z0-9-]+", rest.split("|")[0].split("#")[0]))
        assert options <= options_of(command) | {"--help"}, f"kvasir {command}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)[^`]*`", text_of(page))) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", text_of(page), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md"], ids=lambda page: page.name)
def test_files_named_in_the_architecture_exist(page: Path) -> None:
    for name in re.findall(r"\b(?:src|native|engine|service|model|tools)/[a-z_/]+(?:\.[a-z]+)?", text_of(page)):
        assert (ROOT / name).exists() or (ROOT / "src" / "kvasir" / name).exists(), name


def options_of(command: str) -> set[str]:
    found: set[str] = set()
    root = get_command(app)
    assert command in root.commands, command  # type: ignore[attr-defined]
    at = root.commands[command]  # type: ignore[attr-defined]
    for each in (at, *getattr(at, "commands", {}).values()):
        found |= {option for param in each.params for option in (*param.opts, *param.secondary_opts)}
    return found


@pytest.mark.parametrize("name", [*config.LOAD_OPTIONS, *SAMPLING_OPTIONS])
def test_every_option_is_documented(name: str) -> None:
    assert f"`{name}`" in API


def test_every_error_named_is_one() -> None:
    section = API.split("## Errors")[1].split("## Logging")[0]
    for name in re.findall(r"`([A-Z][A-Za-z]+)`", section):
        assert issubclass(getattr(errors, name), errors.KvasirError), name


def test_the_reference_of_commands_is_current() -> None:
    script = str(ROOT / "tools" / "cli_reference.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = CliRunner().invoke(app, ["--help"]).stdout.split("Commands:")[1].split("Exit codes")[0]
    for command in re.findall(r"^  ([a-z]+)", listed, re.MULTILINE):
        assert f"\n## kvasir {command}\n" in reference
