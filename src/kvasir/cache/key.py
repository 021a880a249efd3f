"""Keys: 32 bytes that name a token prefix in a space.

    key = sha256( fingerprint 32 | type_k 1 | type_v 1 | context_hash 32 | tokens as u32 little endian )

Owns the formula and nothing else. What goes into a fingerprint (weights, adapters, build, tenant scope) and into a
context hash is the caller's knowledge; here they are bytes.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NewType

from kvasir.errors import BadOption

if TYPE_CHECKING:
    from hashlib import _Hash

Key = NewType("Key", bytes)

KEY_BYTES = 32
SPACE_BYTES = 66  # fingerprint, two type bytes, context hash

# The array type code of four unsigned bytes; "I" has four on every platform CPython supports today.
_U32 = next(code for code in "IL" if array(code).itemsize == 4)


@dataclass(frozen=True)
class Space:
    """What makes KV differ: two prefixes are one only within one space.

    The tenant's scope is inside `fingerprint`, so tenants never meet.
    """

    fingerprint: bytes
    type_k: int
    type_v: int
    context_hash: bytes

    def __post_init__(self) -> None:
        for name in ("fingerprint", "context_hash"):
            if len(getattr(self, name)) != KEY_BYTES:
                raise BadOption(f"{name} must be {KEY_BYTES} bytes, got {len(getattr(self, name))}: pass a sha256.")
        for name in ("type_k", "type_v"):
            if not 0 <= getattr(self, name) <= 255:
                raise BadOption(f"{name} must fit one byte, got {getattr(self, name)}.")

    @cached_property
    def head(self) -> bytes:
        """The 66 bytes that every key of this space begins with."""
        return bytes(self.fingerprint) + bytes((self.type_k, self.type_v)) + bytes(self.context_hash)

    @cached_property
    def root(self) -> Key:
        """The key of no tokens: the parent of every row that starts at 0, and the space's own name."""
        return self.key(())

    @cached_property
    def outputs(self) -> Space:
        """The space of what a model says next: the same prefixes, but their rows hold logits instead of memory."""
        return replace(self, context_hash=hashlib.sha256(self.context_hash + b"outputs").digest())

    @classmethod
    def of_head(cls, head: bytes) -> Space:
        """The space whose `head` this is."""
        return cls(bytes(head[:32]), head[32], head[33], bytes(head[34:SPACE_BYTES]))

    def key(self, tokens: Sequence[int]) -> Key:
        """The key of a whole prefix."""
        return self.key_of_packed(pack(tokens))

    def key_of_packed(self, packed: bytes) -> Key:
        """The key of a whole prefix whose tokens are packed already."""
        return Key(hashlib.sha256(self.head + packed).digest())

    def boundaries(self, tokens: Sequence[int], block_tokens: int) -> list[Key]:
        """Keys at every full block, in one pass: `[i]` names the prefix of `(i + 1) * block_tokens` tokens."""
        n_full = len(tokens) // block_tokens
        return list(self.keys_at(tokens, range(block_tokens, n_full * block_tokens + 1, block_tokens)))

    def keys_at(self, tokens: Sequence[int], ends: Iterable[int]) -> Iterator[Key]:
        """Keys of the prefixes that end at `ends`, which must ascend; one pass over the tokens, lazily."""
        packed = memoryview(pack(tokens))
        running: _Hash = hashlib.sha256(self.head)
        done = 0
        for end in ends:
            running.update(packed[4 * done : 4 * end])
            done = end
            yield Key(running.copy().digest())


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as u32 little endian; an `array('I')` is the fastest input (a copy)."""
    try:
        packed = tokens if isinstance(tokens, array) and tokens.typecode == _U32 else array(_U32, tokens)
    except (OverflowError, TypeError) as error:
        raise BadOption(f"tokens must be whole numbers from 0 to 4,294,967,295: {error}.") from None
    if sys.byteorder == "big":
        packed = array(_U32, packed)
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> array[int]:
    """The tokens that `pack` packed."""
    tokens = array(_U32)
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
