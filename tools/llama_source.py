"""Where llama.cpp's source comes from: the pinned source distribution through pip, or a local checkout.

Owns the pin file and the unpacked trees in the cache folder. pip is run as the user configured it (index, proxy,
certificates), and checks the pinned sha256 before any code of the package runs. Nothing here compiles.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from steps import Failure, build_home, disk_faults, locked, no_space, say

PIN_FILE = Path(__file__).resolve().parent.parent / "native" / "llama" / "pin.toml"

# Not needed to build the libraries, the peers or the tests, and half of the tree's size.
LEFT_OUT = frozenset({"docs", "media", "benches", "ci", "examples", "pocs", "app", "gguf-py", "conversion", "skills"})
LEFT_OUT_UI = frozenset(("tools", "ui", name) for name in ("src", "static", "tests"))

# What the libraries are compiled from: a change under these makes another key for a local checkout.
COMPILED = ("CMakeLists.txt", "cmake", "common", "ggml", "include", "src", "vendor")


@dataclass(frozen=True, slots=True)
class Pin:
    """One exact source distribution; `commit` is llama.cpp's own, for reports."""

    package: str
    version: str
    sha256: str
    commit: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class Source:
    """A llama.cpp tree on this machine; equal `identity` means equal code."""

    folder: Path
    identity: str
    commit: str


def read_pin(path: Path = PIN_FILE) -> Pin:
    """The pin as the repository has it."""
    return Pin(**tomllib.loads(path.read_text(encoding="utf-8")))


def source(pin: Pin, environ: Mapping[str, str] = os.environ) -> Source:
    """The tree to build from; fetched and unpacked first where that has not been done."""
    if local := environ.get("KVASIR_LLAMA_CPP_DIR"):
        return local_source(Path(local).expanduser().resolve())
    return Source(unpacked(pin, environ), f"{pin.version}-{pin.sha256}", pin.commit)


def local_source(folder: Path) -> Source:
    """A checkout the user named: used where it lies, never fetched and never written."""
    if not (folder / "include" / "llama.h").is_file():
        raise Failure(f"KVASIR_LLAMA_CPP_DIR={folder} is not a llama.cpp source tree: it has no include/llama.h")
    digest = hashlib.sha256(str(folder).encode())
    for path in compiled_files(folder):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return Source(folder, f"local-{digest.hexdigest()}", "local")


def compiled_files(folder: Path) -> Iterator[Path]:
    """Files whose change has to rebuild the libraries, in a fixed order."""
    for name in COMPILED:
        top = folder / name
        yield from [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())


def unpacked(pin: Pin, environ: Mapping[str, str] = os.environ) -> Path:
    """The pinned tree in the cache folder. Appears there whole or not at all; safe with several builds at once."""
    folder = build_home(environ) / "src" / f"{pin.version}-{pin.sha256[:8]}"
    if folder.is_dir():
        return folder
    with disk_faults(folder), locked(folder):
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as scratch:
            archive = fetch(pin, Path(scratch), environ)
            tree = unpack(archive, Path(scratch) / "tree")
            tree.rename(folder)
    return folder


def fetch(pin: Pin, into: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Download the source distribution with the user's pip and check its hash."""
    if environ.get("KVASIR_OFFLINE", "0") not in ("", "0"):
        raise Failure(f"KVASIR_OFFLINE is set and {pin.requirement} is not in the cache; set KVASIR_LLAMA_CPP_DIR")
    say(f"fetching llama.cpp {pin.commit} ({pin.requirement}, 77 MB) through pip")
    requirements = into / "requirements.txt"
    requirements.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n" if pin.sha256 else f"{pin.requirement}\n")
    # pip draws its bar where somebody watches; what it has to say of a failure comes on the other stream.
    seen = sys.stderr if sys.stderr.isatty() else subprocess.PIPE
    command = pip_download(pin, requirements, into, bar=seen is sys.stderr)
    result = subprocess.run(command, stdout=seen, stderr=subprocess.PIPE, text=True, env=dict(environ))
    archives = list(into.glob("*.tar.gz"))
    if result.returncode != 0 or len(archives) != 1:
        raise pip_failure(pin, (result.stdout or "") + result.stderr, into)
    got = sha256_of(archives[0])
    if pin.sha256 and got != pin.sha256:
        raise wrong_hash(pin, got)
    return archives[0]


def pip_download(pin: Pin, requirements: Path, into: Path, *, bar: bool = False) -> list[str]:
    """The pip command. pip asks the package for its metadata, which needs its build backend."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        pin.package,
        "--progress-bar",
        "on" if bar else "off",
    ]
    if importlib.util.find_spec("scikit_build_core"):
        command.append("--no-build-isolation")  # the backend is here already: seconds instead of a fresh environment
    return [*command, "--dest", str(into), "--requirement", str(requirements)]


def pip_failure(pin: Pin, output: str, into: Path) -> Failure:
    """One line for what pip said in many."""
    if "No module named pip" in output:
        return Failure(f"{sys.executable} has no pip; run '{sys.executable} -m ensurepip' or set KVASIR_LLAMA_CPP_DIR")
    if "No space left on device" in output:
        return no_space(into.parent)
    if got := re.search(r"Got\s+([0-9a-f]{64})", output):
        return wrong_hash(pin, got.group(1))
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else "pip gave no reason"
    return Failure(
        f"cannot fetch {pin.requirement} through pip: {reason} Check the network and pip's index settings, "
        "or set KVASIR_LLAMA_CPP_DIR to a llama.cpp source tree."
    )


def wrong_hash(pin: Pin, got: str) -> Failure:
    return Failure(
        f"{pin.requirement} has the wrong sha256: {PIN_FILE.name} wants {pin.sha256}, got {got}; nothing was unpacked. "
        "Clear pip's cache ('pip cache purge') or check the index it uses."
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def unpack(archive: Path, into: Path) -> Path:
    """Take vendor/llama.cpp out of the source distribution; members can only land inside `into`."""
    say("unpacking llama.cpp")
    with tarfile.open(archive) as tar:
        for member in tar:
            place = kept_place(PurePosixPath(member.name))
            if place is not None and (member.isfile() or member.isdir()):
                tar.extract(member.replace(name=str(place), deep=False), into, set_attrs=False, filter="data")
    if not (into / "include" / "llama.h").is_file():
        raise Failure(
            f"{archive.name} carries no vendor/llama.cpp; pin another version with 'make bump-llama VERSION=...'"
        )
    return into


def kept_place(name: PurePosixPath) -> PurePosixPath | None:
    """Where a member goes in our tree; None for what is not kept."""
    parts = name.parts
    if parts[1:3] != ("vendor", "llama.cpp") or len(parts) < 4 or ".." in parts:
        return None
    inside = parts[3:]
    if inside[0] in LEFT_OUT or inside[0].startswith(".") or inside[:3] in LEFT_OUT_UI:
        return None
    return PurePosixPath(*inside)


def bump(version: str, environ: Mapping[str, str] = os.environ) -> Pin:
    """Move the pin to another version of the package; the hash is what pip delivers now."""
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version):
        raise Failure(f"'{version}' is not a version; say for example 'make bump-llama VERSION=0.3.36'")
    wanted = replace(read_pin(), version=version, sha256="", commit="unknown")
    home = build_home(environ)
    with disk_faults(home):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="bump-") as scratch:
            archive = fetch(wanted, Path(scratch), environ)
            unpack(archive, Path(scratch) / "tree")
            pin = replace(wanted, sha256=sha256_of(archive))
    write_pin(pin)
    say(f"pinned {pin.requirement}, sha256 {pin.sha256}; set the upstream commit in {PIN_FILE.name}, then 'make check'")
    return pin


def write_pin(pin: Pin, path: Path = PIN_FILE) -> None:
    """Replace the values and keep the file's comment."""
    text = path.read_text(encoding="utf-8")
    for name in ("package", "version", "sha256", "commit"):
        text = re.sub(rf'^{name} = ".*"$', f'{name} = "{getattr(pin, name)}"', text, flags=re.MULTILINE)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    shutil.move(temporary, path)
