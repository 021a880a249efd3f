"""Calls that may take long let other threads run meanwhile.

While these tests run, Python never takes the GIL away from a thread that has it. So another thread sees a call in
progress only if that call lets go of the GIL by itself, and a slow machine only needs more calls until it does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kvasir import native
from tests.contract.core import some_tokens

NEVER_S = 1e4


class Onlooker(threading.Thread):
    """Looks every now and then whether a call is in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.in_call = self.saw_call = self.stop = False

    def run(self) -> None:
        while not (self.saw_call or self.stop):
            self.saw_call = self.in_call
            time.sleep(0.0001)


@pytest.fixture
def onlooker() -> Iterator[Onlooker]:
    thread, interval = Onlooker(), sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    thread.start()
    yield thread
    sys.setswitchinterval(interval)
    thread.stop = True
    thread.join()


def is_seen(
    onlooker: Onlooker,
    call: Callable[[], object],
    *,
    after: Callable[[], object] = lambda: None,
    patience_s: float = 120.0,
) -> bool:
    """Whether the other thread runs during one of these calls; `after` each it may run as it likes."""
    until = time.monotonic() + patience_s
    while not onlooker.saw_call and time.monotonic() < until:
        onlooker.in_call = True
        call()
        onlooker.in_call = False
        after()
    return onlooker.saw_call


def test_a_call_that_keeps_the_gil_is_not_seen(onlooker: Onlooker) -> None:
    """Else the tests below would say nothing."""
    assert not is_seen(onlooker, lambda: sum(range(100_000)), patience_s=0.5)


def test_loading_lets_others_run(onlooker: Onlooker, tiny_llama: Path) -> None:
    assert is_seen(onlooker, lambda: native.Model.load(str(tiny_llama)))


def test_a_step_lets_others_run(onlooker: Onlooker, tiny_llama: Path) -> None:
    context = native.Context(native.Model.load(str(tiny_llama)), n_ctx=512, threads=1)
    rows = [native.Row(0, 0, some_tokens(256))]
    assert is_seen(onlooker, lambda: context.step(rows), after=context.memory.clear)


def test_embedding_lets_others_run(onlooker: Onlooker, tiny_bert: Path) -> None:
    context = native.Context(native.Model.load(str(tiny_bert)), n_ctx=512, threads=1, embeddings=True)
    texts = [[2, *range(5, 69), 3]] * 4
    assert is_seen(onlooker, lambda: context.embed(texts))


def test_quantizing_lets_others_run(onlooker: Onlooker, tiny_llama: Path, tmp_path: Path) -> None:
    paths = (str(tmp_path / f"{i}.gguf") for i in count())
    assert is_seen(onlooker, lambda: native.quantize(str(tiny_llama), next(paths), to="q8_0", threads=1))


def test_exporting_a_span_lets_others_run(onlooker: Onlooker, tiny_llama: Path) -> None:
    context = native.Context(native.Model.load(str(tiny_llama)), n_ctx=2048, n_batch=1024, threads=1)
    assert context.step([native.Row(0, 0, some_tokens(1024))]).status == "ok"
    assert is_seen(onlooker, lambda: context.memory.export_span(0, 0, 1024))
