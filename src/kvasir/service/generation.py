"""What users loop over: one reply of a session, as it comes.

Owns reading and leaving. The reply itself comes to its end without a reader; `run.py` has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from kvasir.service.chunks import Chunk, Done, Error, Text
from kvasir.service.run import Run


class Generation:
    """A reply of a session, as it comes: iterate with `for` or `async for`.

    >>> for chunk in session.generate_stream(max_new_tokens=64):
    ...     match chunk:
    ...         case Text(text):
    ...             print(text, end="", flush=True)
    ...         case Done(reason, usage):
    ...             print(reason, usage.cached_tokens)
    ...         case Error(error):
    ...             print(error)

    The last chunk is a `Done` or an `Error`; nothing is raised. `result()`, or `await`, reads to the end and returns
    the `Done`, or raises. Leaving the loop or a `with` block, and dropping the stream, stop the reply: the session then
    holds what was read of it and no more. After `cancel()` the rest that was made can still be read, and counts.
    One reader at a time.
    """

    def __init__(self, run: Run, owner: object) -> None:
        self._run = run
        self._owner = owner  # a service dropped while its stream runs would close under it
        self._n_seen = 0
        self._last: Done | Error | None = None
        self._closed = False

    def cancel(self) -> None:
        """Stop the reply, from any thread; harmless when it has ended. Read on for what was made until then."""
        self._run.cancel()

    def close(self) -> None:
        """Leave the stream: stop the reply and forget what was not read of it. Harmless when it was read to the end."""
        if self._last is None and not self._closed:
            self._closed = True
            self._run.leave(self._n_seen)

    def result(self) -> Done:
        """Read to the end and return how it ended; its `completion` has the whole reply. Raises where it failed."""
        with self:
            while self._last is None:
                self._note(self._run.chunks.get())
        return self._ended()

    def __await__(self) -> Generator[Any, None, Done]:
        return self._aresult().__await__()

    def __iter__(self) -> Loop:
        return Loop(self)

    def __aiter__(self) -> Loop:
        return Loop(self)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()

    async def _aresult(self) -> Done:
        with self:
            while self._last is None:
                self._note(await self._run.chunks.aget())
        return self._ended()

    @property
    def _is_over(self) -> bool:
        return self._last is not None or self._closed

    def _note(self, chunk: Chunk) -> Chunk:
        if isinstance(chunk, Text):
            self._n_seen += len(chunk.text)
        else:
            self._last = chunk
        return chunk

    def _ended(self) -> Done:
        assert self._last is not None
        if isinstance(self._last, Error):
            raise self._last.error
        return self._last


class Loop:
    """One loop over a generation. An object, not a generator: it is dropped, and the reply left, right at a `break`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __iter__(self) -> Loop:
        return self

    def __aiter__(self) -> Loop:
        return self

    def __next__(self) -> Chunk:
        if self._generation._is_over:
            raise StopIteration
        return self._generation._note(self._generation._run.chunks.get())

    async def __anext__(self) -> Chunk:
        if self._generation._is_over:
            raise StopAsyncIteration
        return self._generation._note(await self._generation._run.chunks.aget())

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._generation.close()
