"""One model file into another layout: llama.cpp's quantizer, with room checked and failures told apart.

Owns the single act of writing; `store.py` and `conversion.py` decide where, and make it appear whole or not at all.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from kvasir.errors import BadOption, ModelLoadError, NoSpace, suggest
from kvasir.model.layouts import LAYOUT_BITS, converted_bytes, layout_of
from kvasir.model.transfer import check_room

Converting = Callable[[float], bool]
"""Called with the part converted, 0 to 1; returning False gives up, and so does what it raises."""

# With less than this left, a write that failed failed for lack of room.
FULL_BELOW_BYTES = 4 << 20


def go_on(_part: float) -> bool:
    """Report nothing and never give up. Running Python now and then is what lets Ctrl-C end a conversion."""
    return True


def checked_layout(to: str) -> str:
    """The layout's name in lower case; raises `BadOption` for one that cannot be converted to."""
    if to.lower() not in LAYOUT_BITS:
        raise BadOption(f"a layout is one of {', '.join(LAYOUT_BITS)}, got {to!r}.{suggest(to.lower(), LAYOUT_BITS)}")
    return to.lower()


def converted_name(path: Path, to: str) -> str:
    """A file name for a converted model: the old one with the layout it names replaced, or added."""
    split = re.sub(r"-00001-of-\d{5}$", "", path.stem)
    named = "|".join(LAYOUT_BITS)
    return re.sub(rf"[._-]({named})$", "", split, flags=re.IGNORECASE) + f"-{to}.gguf"


def quantize(source: Path, target: Path, *, to: str, converting: Converting = go_on) -> None:
    """Write a model's weights in another layout. Blocks; a failure may leave an unfinished target.

    Raises `BadOption` where the file has that layout already, `ModelLoadError` or `NoSpace`.
    """
    from kvasir import native  # a command that only lists models needs no native code

    facts = native.check_gguf(str(source))
    if layout_of(facts.file_type) == to:
        raise BadOption(f"{source} is {facts.file_type} already; there is nothing to convert.")
    needed = converted_bytes(_total_bytes(source), facts.file_type, to)
    check_room(target.parent, needed, what=f"{source.name} as {to}")
    try:
        native.quantize(str(source), str(target), to=to, progress=converting)
    except ModelLoadError as error:
        if shutil.disk_usage(target.parent).free >= FULL_BELOW_BYTES:
            raise
        raise NoSpace(f"the disk of {target.parent} is full; {source.name} as {to} takes {needed:,} bytes.") from error


def _total_bytes(source: Path) -> int:
    """The file's size, with its siblings' where the model is split."""
    split = re.fullmatch(r"(.*)-00001-(of-\d{5}\.gguf)", source.name)
    files = [source] if split is None else source.parent.glob(f"{glob.escape(split[1])}-*-{split[2]}")
    return sum(file.stat().st_size for file in files)
