"""Where llama.cpp's source comes from: pinned and checked, atomic, one clear line for each fault of the world."""

from __future__ import annotations

import errno
import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

import llama_cpp
import llama_source
import steps

Archive = Callable[..., Path]


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Make a source distribution with the given members under its vendor/llama.cpp."""

    def make(*members: str) -> Path:
        path = tmp_path / "pkg-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in members or ("include/llama.h", "src/llama.cpp", "docs/readme.md"):
                entry = tarfile.TarInfo(f"pkg-1.0/vendor/llama.cpp/{name}")
                entry.size = 3
                tar.addfile(entry, io.BytesIO(b"abc"))
        return path

    return make


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"KVASIR_HOME": str(tmp_path / "home"), "PATH": ""}


def pin_of(path: Path) -> llama_source.Pin:
    return llama_source.Pin("pkg", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "abc")


def pip_delivers(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[int]:
    """Let `pip download` copy this file; returns a list that grows with each call."""
    calls: list[int] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(1)
        (Path(command[command.index("--dest") + 1]) / path.name).write_bytes(path.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    return calls


def test_the_pin_names_one_exact_file() -> None:
    pin = llama_source.read_pin()
    assert pin.package == "llama-cpp-python"
    assert len(bytes.fromhex(pin.sha256)) == 32


def test_the_tree_is_unpacked_once_and_without_what_no_build_needs(
    monkeypatch: pytest.MonkeyPatch, archive: Archive, home: dict[str, str]
) -> None:
    path = archive()
    calls = pip_delivers(monkeypatch, path)
    first = llama_source.unpacked(pin_of(path), home)
    assert (first / "src" / "llama.cpp").read_bytes() == b"abc"
    assert not (first / "docs").exists()
    assert llama_source.unpacked(pin_of(path), home) == first
    assert len(calls) == 1


def test_a_wrong_hash_is_one_line_with_both_hashes_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, archive: Archive, home: dict[str, str]
) -> None:
    path = archive()
    pip_delivers(monkeypatch, path)
    pin = llama_source.Pin("pkg", "1.0", "0" * 64, "abc")
    with pytest.raises(steps.Failure, match=f"wants {'0' * 64}, got {pin_of(path).sha256}"):
        llama_source.unpacked(pin, home)
    assert not [found for found in steps.build_home(home).rglob("*") if found.suffix != ".lock" and found.is_file()]


def test_pip_is_told_the_hash_so_that_no_code_of_a_wrong_package_runs(
    monkeypatch: pytest.MonkeyPatch, archive: Archive, tmp_path: Path
) -> None:
    path = archive()
    pin = pin_of(path)
    pip_delivers(monkeypatch, path)
    (tmp_path / "into").mkdir()
    llama_source.fetch(pin, tmp_path / "into", {})
    assert (tmp_path / "into" / "requirements.txt").read_text() == f"pkg==1.0 --hash=sha256:{pin.sha256}\n"


def test_pips_own_hash_error_becomes_our_line() -> None:
    output = f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 {'0' * 64}\n    Got        {'1' * 64}\n"
    failure = llama_source.pip_failure(llama_source.read_pin(), output, Path())
    assert "wrong sha256" in str(failure)
    assert "1" * 64 in str(failure)


def test_no_network_is_one_line_that_names_the_way_out(tmp_path: Path) -> None:
    environ = {
        "KVASIR_HOME": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # the discard port: nothing listens
        "PIP_RETRIES": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    tool = Path(llama_cpp.__file__)
    result = subprocess.run([sys.executable, tool, "source"], env=environ, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kvasir: error: cannot fetch llama-cpp-python==")
    assert "KVASIR_LLAMA_CPP_DIR" in last


def test_offline_mode_never_calls_pip(monkeypatch: pytest.MonkeyPatch, archive: Archive, home: dict[str, str]) -> None:
    calls = pip_delivers(monkeypatch, archive())
    with pytest.raises(steps.Failure, match="KVASIR_OFFLINE is set"):
        llama_source.unpacked(llama_source.read_pin(), home | {"KVASIR_OFFLINE": "1"})
    assert calls == []


def test_a_full_disk_while_unpacking_is_one_line_and_leaves_no_half_tree(
    monkeypatch: pytest.MonkeyPatch, archive: Archive, home: dict[str, str]
) -> None:
    path = archive()
    pip_delivers(monkeypatch, path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with pytest.raises(steps.Failure, match=r"no space left on the disk of .*KVASIR_HOME"):
        llama_source.unpacked(pin_of(path), home)
    assert not [found for found in steps.build_home(home).rglob("*") if found.suffix != ".lock" and found.is_file()]


def test_a_full_disk_while_pip_downloads_is_the_same_line(tmp_path: Path) -> None:
    output = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "no space left on the disk" in str(llama_source.pip_failure(llama_source.read_pin(), output, tmp_path))


def test_two_builds_at_once_fetch_once(monkeypatch: pytest.MonkeyPatch, archive: Archive, home: dict[str, str]) -> None:
    path = archive()
    calls = pip_delivers(monkeypatch, path)
    pin = pin_of(path)
    builds = [threading.Thread(target=llama_source.unpacked, args=(pin, home)) for _ in range(4)]
    for build in builds:
        build.start()
    for build in builds:
        build.join()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "name",
    [
        "pkg/vendor/llama.cpp/../../../etc/passwd",
        "pkg/setup.py",
        "pkg/vendor/llama.cpp",
        "pkg/vendor/llama.cpp/.git/config",
    ],
)
def test_members_outside_the_vendored_tree_are_not_kept(name: str) -> None:
    assert llama_source.kept_place(PurePosixPath(name)) is None


def test_a_local_checkout_is_used_where_it_lies_and_a_change_gives_another_identity(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "llama.h"
    header.write_text("one")
    environ = {"KVASIR_LLAMA_CPP_DIR": str(tmp_path)}
    first = llama_source.source(llama_source.read_pin(), environ)
    assert first.folder == tmp_path
    header.write_text("another")
    assert llama_source.source(llama_source.read_pin(), environ).identity != first.identity


def test_a_folder_that_is_no_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(steps.Failure, match=r"has no include/llama\.h"):
        llama_source.source(llama_source.read_pin(), {"KVASIR_LLAMA_CPP_DIR": str(tmp_path)})


def test_a_package_without_llama_cpp_is_refused(archive: Archive, tmp_path: Path) -> None:
    with pytest.raises(steps.Failure, match=r"carries no vendor/llama\.cpp"):
        llama_source.unpack(archive("other.txt"), tmp_path / "tree")


def test_moving_the_pin_rewrites_values_and_keeps_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "pin.toml"
    path.write_text(llama_source.PIN_FILE.read_text())
    moved = llama_source.Pin("llama-cpp-python", "9.9.9", "a" * 64, "fedcba")
    llama_source.write_pin(moved, path)
    assert llama_source.read_pin(path) == moved
    assert path.read_text().startswith("# Which llama.cpp")


def test_a_version_that_is_none_is_refused_before_pip_sees_it() -> None:
    with pytest.raises(steps.Failure, match="is not a version"):
        llama_source.bump("--index-url=elsewhere")
