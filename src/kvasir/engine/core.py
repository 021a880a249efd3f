"""What the engine needs of the native core, as protocols.

Owns the shape only. `kvasir.native` and `kvasir.native.fake` both have it, so the engine runs unchanged on either;
nothing in this package imports the compiled extension.
"""

# ruff: noqa: D102 - the native stub documents these names; here they are only a shape

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Logprobs(Protocol):
    """The chosen token's log probability and the likeliest alternatives as (token, logprob)."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...


class Step(Protocol):
    """What one decode did; `tokens`, `logprobs` and `errors` have one entry per row."""

    @property
    def status(self) -> str: ...
    @property
    def tokens(self) -> list[int | None]: ...
    @property
    def logprobs(self) -> Sequence[Logprobs | None]: ...
    @property
    def errors(self) -> list[str | None]: ...


class Memory(Protocol):
    """The KV memory of a context."""

    @property
    def kind(self) -> str: ...
    @property
    def n_cells(self) -> int: ...
    @property
    def used_cells(self) -> int: ...
    def remove(self, seq: int, p0: int, p1: int | None, /) -> bool: ...
    def share(self, src: int, dst: int, n_tokens: int, /) -> bool: ...
    def pos_max(self, seq: int, /) -> int | None: ...
    def clear(self) -> None: ...


class Context(Protocol):
    """A decoding context. Only `abort` may be called off the thread that owns it."""

    @property
    def memory(self) -> Any: ...  # a Memory; Any, because a compiled class states no protocol
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_ctx_seq(self) -> int: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def n_seq_max(self) -> int: ...
    @property
    def kv_unified(self) -> bool: ...
    @property
    def n_rows_decoded(self) -> int: ...
    def step(self, rows: list[Any], /) -> Any: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Core(Protocol):
    """The module: what makes contexts and rows."""

    @property
    def Context(self) -> Callable[..., Any]: ...  # noqa: N802 - a class, named as the core names it
    @property
    def devices(self) -> Callable[[], list[Any]]: ...
    @property
    def Row(self) -> Callable[..., Any]: ...  # noqa: N802
