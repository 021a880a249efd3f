"""Where a row's file is: a pure function of its name, and back.

    <root>/LOCK                                                       ledger.py
    <root>/v2-256/temp/<host>-<pid>-<born>-<n>.tmp                    being written; never read as a row
    <root>/v2-256/<space>/blocks/<x>/<key>-<parent>-<start>-<end>.row full blocks; x is the key's first digit
    <root>/v2-256/<space>/tails/<parent>/<key>-...-<end>.row          all other rows, by what they follow

A search knows the tokens, hence every field of a block's name: another process's row is one `stat` away, and the tails
that follow a prefix are one listing away. Version and block size are in the path, so other rows are never met.
"""

from __future__ import annotations

import re

from kvasir.cache.codec import VERSION
from kvasir.cache.key import Key
from kvasir.cache.row import RowName

_FOLDER = re.compile(r"v[0-9]+-[0-9]+")
SPACE_DIGITS = 64


class Layout:
    """Paths under one root for one block size."""

    def __init__(self, root: str, block_tokens: int) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.top = f"{root}/v{VERSION}-{block_tokens}"
        self.temp = f"{self.top}/temp"

    def is_block(self, name: RowName) -> bool:
        """Whether a row is exactly one full block."""
        return name.n_tokens == self.block_tokens and name.start % self.block_tokens == 0

    def folder(self, name: RowName) -> str:
        """The folder of a row's file."""
        key = name.key.hex()
        return (
            f"{self.space(name.space)}/blocks/{key[0]}" if self.is_block(name) else self.tails(name.space, name.parent)
        )

    def path(self, name: RowName) -> str:
        """The path of a row's file."""
        return f"{self.folder(name)}/{name.key.hex()}-{name.parent.hex()}-{name.start}-{name.end}.row"

    def space(self, space: Key) -> str:
        """The folder of a space."""
        return f"{self.top}/{space.hex()}"

    def tails(self, space: Key, parent: Key) -> str:
        """The folder of the tails that follow a prefix."""
        return f"{self.space(space)}/tails/{parent.hex()}"

    def is_ours(self, folder: str) -> bool:
        """Whether a folder of the root is this layout's own."""
        return f"{self.root}/{folder}" == self.top

    def is_other(self, folder: str) -> bool:
        """Whether a folder of the root is another version's, or another block size's."""
        return _FOLDER.fullmatch(folder) is not None and not self.is_ours(folder)

    def is_other_version(self, folder: str) -> bool:
        """Whether a folder of the root is of another version of the format, which nobody can read."""
        return self.is_other(folder) and folder.partition("-")[0] != f"v{VERSION}"


def parse(space: Key, file_name: str) -> RowName | None:
    """The row a file name names, or None for a name we do not write. A start calls this 100,000 times: no pattern."""
    try:
        key, parent, start, end = file_name.removesuffix(".row").split("-")
        name = RowName(space, Key(bytes.fromhex(key)), Key(bytes.fromhex(parent)), int(start), int(end))
    except ValueError:
        return None
    is_ours = len(key) == len(parent) == SPACE_DIGITS and name.start < name.end and file_name[-4:] == ".row"
    return name if is_ours else None


def parse_space(folder: str) -> Key | None:
    """The space a folder holds, or None for a name we do not write."""
    if len(folder) != SPACE_DIGITS or not re.fullmatch(r"[0-9a-f]+", folder):
        return None
    return Key(bytes.fromhex(folder))
