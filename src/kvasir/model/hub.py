"""Models on the Hugging Face Hub, through `huggingface_hub` (the optional extra `hub`).

Token, endpoint, proxies and offline mode are that library's own (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`). The
bytes go into a partial file of ours, named after the file's hash, so that an interrupted download goes on with a
Range request even in another process: the library's own download throws its partial file away. Every hub failure
becomes one of our errors here.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from kvasir.errors import BadOption, ChecksumMismatch, KvasirError, ModelNotFound, Offline, StoreError, suggest
from kvasir.model.reference import HubFile
from kvasir.model.transfer import Progress, check_room, listed, missing_inside, sha256_of

if TYPE_CHECKING:
    from types import ModuleType

# How llama.cpp names the files of a split model; it finds the others beside the first.
_SPLIT = re.compile(r"-00001-of-(\d{5})\.gguf$")


def fetch(reference: HubFile, work: Path, *, progress: Progress) -> list[Path]:
    """Fetch a file, and its siblings where the model is split over several; return them, the first to load first."""
    assert reference.file is not None, "the store asks for a file first"
    with _hub_errors(reference):
        sources = [_look_up(reference, name) for name in _split_names(reference.file)]
        sizes = [source.size_bytes for source in sources]
        total = None if None in sizes else sum(size for size in sizes if size is not None)
        done = 0
        files = []
        for source in sources:
            files.append(_fetch_one(reference, source, work, done, total, progress))
            done += files[-1].stat().st_size
        return files


def gguf_files(reference: HubFile) -> list[str]:
    """The GGUF files of a repository, at the reference's revision, by name."""
    with _hub_errors(reference):
        names = _hub().HfApi().list_repo_files(reference.repo, revision=reference.revision)
        return sorted(name for name in names if name.endswith(".gguf"))


def name_a_file(reference: HubFile) -> KvasirError:
    """The error for a reference that names only a repository: it lists what could have been meant."""
    names = gguf_files(reference)
    if not names:
        return ModelNotFound(f"{reference} holds no GGUF files.")
    example = HubFile(reference.repo, names[0], reference.revision)
    return BadOption(f"{reference} must name a file, for instance {example}; it holds {listed(names)}.")


def _hub() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError:
        raise StoreError("hf: references need huggingface_hub; run: pip install 'kvasir-llm[hub]'") from None
    return huggingface_hub


class _Source(NamedTuple):
    """A file as the hub describes it before the first byte."""

    name: str
    url: str
    etag: str
    size_bytes: int | None

    @property
    def sha256(self) -> str | None:
        """Large files have their hash as their etag."""
        return self.etag if re.fullmatch(r"[0-9a-f]{64}", self.etag) else None


def _split_names(name: str) -> list[str]:
    match = _SPLIT.search(name)
    if match is None:
        return [name]
    stem, n_files = name[: match.start()], int(match[1])
    return [f"{stem}-{number:05}-of-{n_files:05}.gguf" for number in range(1, n_files + 1)]


def _look_up(reference: HubFile, name: str) -> _Source:
    hub = _hub()
    url = hub.hf_hub_url(reference.repo, name, revision=reference.revision)
    facts = hub.get_hf_file_metadata(url)
    # The commit, so that a branch that moves meanwhile cannot mix two versions of a file.
    pinned = hub.hf_hub_url(reference.repo, name, revision=facts.commit_hash or reference.revision)
    return _Source(name, pinned, facts.etag or "", facts.size)


def _fetch_one(
    reference: HubFile, source: _Source, work: Path, before: int, total: int | None, progress: Progress
) -> Path:
    whole = work / PurePosixPath(source.name).name
    if whole.exists():
        return whole
    tag = re.sub(r"[^0-9A-Za-z]", "", source.etag)[:64]
    partial = work / f"{whole.name}.{tag}.partial"
    with _Counted(partial, before, total, progress) as file:
        if source.size_bytes is not None:
            file.drop_if_over(source.size_bytes)
            check_room(work, source.size_bytes - file.n_bytes, what=str(reference))
        _get(source, file)
    if source.sha256 is not None and (came := sha256_of(partial)) != source.sha256:
        partial.unlink()
        raise ChecksumMismatch(
            f"{reference} should have sha256 {source.sha256}, but {came} came; nothing was kept, fetch it again."
        )
    return partial.rename(whole)


class _Counted(io.FileIO):
    """A partial file, open at its end, that reports its growth."""

    def __init__(self, path: Path, before: int, total: int | None, progress: Progress) -> None:
        path.touch()
        super().__init__(path, "r+")
        self.n_bytes = self.seek(0, io.SEEK_END)
        self._before, self._total, self._progress = before, total, progress

    def drop_if_over(self, size_bytes: int) -> None:
        """Begin anew if there are more bytes than the whole file has: they cannot be its beginning."""
        if self.n_bytes > size_bytes:
            self.n_bytes = self.truncate(self.seek(0))

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        while view:  # a raw file may take less than it was given
            view = view[super().write(view) :]
        self._progress(self._before + self.tell(), self._total)
        return len(data)


def _get(source: _Source, file: _Counted) -> None:
    hub = _hub()
    headers = hub.utils.build_hf_headers(library_name="kvasir")
    with _no_bars(hub):
        hub.file_download.http_get(
            source.url, file, resume_size=file.n_bytes, headers=headers, expected_size=source.size_bytes
        )


@contextlib.contextmanager
def _no_bars(hub: ModuleType) -> Iterator[None]:
    """Silence the library's own progress bar of this one download; we report in our own way."""
    bar = "huggingface_hub.http_get"
    if hub.utils.are_progress_bars_disabled(bar):
        yield
        return
    hub.utils.disable_progress_bars(bar)
    try:
        yield
    finally:
        hub.utils.enable_progress_bars(bar)


@contextlib.contextmanager
def _hub_errors(reference: HubFile) -> Iterator[None]:
    """Turn what `huggingface_hub` and its HTTP client raise into our errors."""
    errors = _hub().errors
    try:
        yield
    except KvasirError:
        raise
    except errors.OfflineModeIsEnabled:
        raise Offline(
            f"{reference} is not in the store and HF_HUB_OFFLINE forbids the network; unset it once."
        ) from None
    except errors.HfHubHTTPError as error:
        raise _http_error(reference, error) from error
    except Exception as error:
        # Which HTTP client the library uses changes with its version, so its errors are known by their package.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise Offline(f"the hub could not be reached for {reference} ({error}); run it again to go on.") from error
        if isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno is None):
            raise StoreError(f"the download of {reference} broke off: {_first_line(error)}") from error
        raise


def _http_error(reference: HubFile, error: Any) -> KvasirError:
    errors, status = _hub().errors, error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return StoreError(f"{reference} is gated; accept its terms on the hub and set HF_TOKEN.")
    if status in (401, 403):
        return StoreError(f"the hub answered {status} for {reference}: it does not exist, or HF_TOKEN may not read it.")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{reference.repo} on the hub has no revision {reference.revision!r}.")
    if isinstance(error, errors.EntryNotFoundError) and reference.file is not None:
        names = _names_if_any(reference)
        return missing_inside(f"hf:{reference.repo}", reference.file, names, suggest(reference.file, names))
    if status == 404:
        return ModelNotFound(f"the hub has no repository {reference.repo!r}.")
    return StoreError(f"the hub answered {status} for {reference}: {_first_line(error)}")


def _names_if_any(reference: HubFile) -> list[str]:
    """The repository's files for a suggestion, where a second question to the hub gets an answer."""
    try:
        return gguf_files(reference)
    except KvasirError:
        return []


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
