"""Many callers of one embedder at once, in an order that a test decides: the first decode waits until all have come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvasir.engine.embedder import Embedder


class GatedContext:
    """A context whose decodes are noted and wait for a gate. Everything else is the context's own."""

    def __init__(self, core: GatedCore, context: Any) -> None:
        self._core = core
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def embed(self, texts: list[list[int]]) -> Any:
        self._core.calls.append(texts)
        self._core.entered.set()
        self._core.gate.wait()
        if self._core.interrupts:
            self._core.interrupts -= 1
            raise KeyboardInterrupt
        return self._context.embed(texts)


class GatedCore:
    """A core, real or fake, that makes such contexts."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.options: list[dict[str, Any]] = []  # of every context made
        self.calls: list[list[list[int]]] = []  # the texts of every decode
        self.interrupts = 0  # decodes that end as if Ctrl-C were pressed

    def Context(self, model: Any, **options: Any) -> GatedContext:  # noqa: N802 - named as the core names it
        self.options.append(options)
        return GatedContext(self, self._core.Context(model, **options))


def together(
    embedder: Embedder,
    core: GatedCore,
    calls: Sequence[Callable[[], Any]],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Make each call on a thread of its own; what each returned or raised.

    The first one decodes, all others come while it does and wait in the order given; then `meanwhile` is called, and
    the decode goes on.
    """
    got: list[Any] = [None] * len(calls)

    def work(i: int) -> None:
        try:
            got[i] = calls[i]()
        except BaseException as error:
            got[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for i, thread in enumerate(threads):
        thread.start()
        core.entered.wait()
        while len(embedder._waiting) < i and thread.is_alive():
            thread.join(0.001)
    meanwhile()
    core.gate.set()
    for thread in threads:
        thread.join()
    return got
