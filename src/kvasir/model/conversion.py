"""Convert a model to another layout of its weights, into the store or into a file.

Owns where the result goes and that it appears whole or not at all. `quantize.py` writes it, `layouts.py` knows which
layout is worth it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvasir.config import StoreSettings
from kvasir.errors import BadOption, NoSpace, StoreError
from kvasir.model import store
from kvasir.model.quantize import Converting, checked_layout, converted_name, go_on, quantize
from kvasir.model.reference import Converted, LocalFile, parse
from kvasir.model.transfer import Progress, sync


def convert(
    ref: str | os.PathLike[str] | None = None,
    *,
    to: str,
    output: str | os.PathLike[str] | None = None,
    settings: StoreSettings | None = None,
    model_dir: Path | None = None,
    progress: Progress | None = None,
    converting: Converting = go_on,
) -> Path:
    """Write a model with its weights in the layout `to` ("q8_0", "q4_k_m", "f16", ...) and return where it is.

    A model of the store becomes an entry of its own, `REF@layout`, and is not converted again; a file becomes a file
    beside it, or `output`. What is not here is fetched first. The original is kept, and a converted model is always
    made from it. Blocks; `progress` follows a download in bytes, `converting` the conversion, 0 to 1. Nothing is left
    behind by one that fails or is interrupted. Raises `BadOption`, `ModelNotFound`, `ModelLoadError` or a `StoreError`.
    """
    layout = checked_layout(to)
    reference = parse(ref)
    if isinstance(reference, LocalFile):
        path = store.resolve(reference.path, model_dir=model_dir)
    else:
        original = reference.source if isinstance(reference, Converted) else reference
        if output is None:
            wanted = str(Converted(original, layout))
            return store.resolve(wanted, settings, progress=progress, converting=converting)
        path = store.resolve(str(original), settings, progress=progress)
    target = path.with_name(converted_name(path, layout)) if output is None else Path(output).expanduser()
    _write(path, target, layout, converting)
    return target


def _write(source: Path, target: Path, layout: str, converting: Converting) -> None:
    """Convert into a temporary file of the same folder, make it safe, then give it its name."""
    if not target.parent.is_dir():
        raise StoreError(f"there is no folder {target.parent}; create it, or name another output.")
    with _write_errors(target), _temporary(target) as temp:
        if target.exists():
            raise BadOption(f"{target} exists already; remove it, or name another output.")
        quantize(source, temp, to=layout, converting=converting)
        sync(temp)
        temp.rename(target)
        sync(target.parent)


@contextlib.contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
        raise kind(f"{target} cannot be written ({error.strerror}); name another output.") from error


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A hidden name beside the target, for us alone; what a killed process left under it is overwritten."""
    temp = target.with_name(f".{target.name}.partial")
    with temp.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another process is writing {target}; wait for it, or name another output.") from None
        try:
            yield temp
        finally:
            temp.unlink(missing_ok=True)
