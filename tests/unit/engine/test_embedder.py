"""Embeddings and rank scores, batched and alone."""

from __future__ import annotations

import threading
from functools import partial
from typing import cast

import numpy as np
import pytest

from kvasir.engine import EngineSettings
from kvasir.engine.core import Core
from kvasir.engine.embedder import Embedder, normalized
from kvasir.errors import BadOption, Closed, PromptTooLong, Unsupported
from kvasir.native import fake
from tests.unit.engine.crowd import GatedCore, together
from tests.unit.engine.rig import CORE, prompt


def make(path: str) -> Embedder:
    return Embedder(CORE, fake.Model.load(path), EngineSettings(threads=1))


TEXTS = [list(prompt(3 + 7 * i, salt=i)) for i in range(12)]


@pytest.mark.parametrize("path", ["fake:embed", "fake:plain"])
def test_many_texts_at_once_equal_each_alone(path: str) -> None:
    embedder = make(path)
    together = embedder.embed(TEXTS)
    assert together.shape == (12, 32)
    assert np.allclose(np.linalg.norm(together, axis=1), 1)
    for i, text in enumerate(TEXTS):
        assert np.allclose(embedder.embed([text])[0], together[i])


def test_normalising_is_l2_max_or_nothing() -> None:
    vectors = np.array([[3.0, -4.0], [0.0, 0.0]], dtype=np.float32)
    assert np.allclose(normalized(vectors, "l2"), [[0.6, -0.8], [0.0, 0.0]])
    assert np.allclose(normalized(vectors, "max"), [[0.75, -1.0], [0.0, 0.0]])
    assert normalized(vectors, None) is vectors
    with pytest.raises(BadOption, match="normalize"):
        normalized(vectors, "l3")  # type: ignore[arg-type]


def test_a_reranker_scores_and_does_not_embed_and_the_reverse() -> None:
    scores = make("fake:rank").rank(TEXTS)
    assert scores.shape == (12,)
    with pytest.raises(Unsupported, match="rank"):
        make("fake:rank").embed(TEXTS)
    with pytest.raises(Unsupported, match="ranking head"):
        make("fake:embed").rank(TEXTS)


def test_a_longer_text_gets_a_larger_context_and_too_long_says_both_numbers() -> None:
    embedder = make("fake:embed?n_ctx_train=4096")
    short = embedder.embed([TEXTS[0]])
    assert embedder.embed([list(prompt(3000))]).shape == (1, 32)
    assert np.array_equal(embedder.embed([TEXTS[0]]), short)
    with pytest.raises(PromptTooLong) as refused:
        embedder.embed([list(prompt(5000))])
    assert (refused.value.n_tokens, refused.value.limit) == (5000, 4096)


def test_an_empty_text_is_refused_and_no_texts_give_no_rows() -> None:
    embedder = make("fake:embed")
    with pytest.raises(BadOption, match="empty"):
        embedder.embed([[]])
    assert embedder.embed([]).shape == (0, 32)


def test_two_threads_take_turns_and_a_closed_one_says_so() -> None:
    embedder = make("fake:embed")
    wanted = embedder.embed(TEXTS)
    got: list[bool] = []

    def work() -> None:
        got.extend(np.array_equal(embedder.embed(TEXTS), wanted) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 10
    embedder.close()
    embedder.close()
    with pytest.raises(Closed):
        embedder.embed(TEXTS)


def gated(path: str) -> tuple[Embedder, GatedCore]:
    core = GatedCore(fake)
    return Embedder(cast(Core, core), fake.Model.load(path), EngineSettings(threads=1)), core


def test_its_threads_poll_as_briefly_as_the_engine_s() -> None:
    embedder, core = gated("fake:embed")
    core.gate.set()
    embedder.embed(TEXTS)
    assert [options["poll"] for options in core.options] == [1]


def test_who_waits_is_batched_into_the_next_decode() -> None:
    embedder, core = gated("fake:embed")
    got = together(embedder, core, [partial(embedder.embed, [text]) for text in TEXTS[:8]])
    assert [len(texts) for texts in core.calls] == [1, 7]
    singles = make("fake:embed")
    for vectors, text in zip(got, TEXTS[:8], strict=True):
        assert np.allclose(vectors, singles.embed([text]))


def test_a_decode_takes_no_more_than_fits() -> None:
    embedder, core = gated("fake:embed?n_ctx_train=64")
    sizes = [10, 30, 30, 30, 60, 5]
    got = together(embedder, core, [partial(embedder.embed, [list(prompt(n))]) for n in sizes])
    assert [sorted(map(len, texts)) for texts in core.calls[:1]] == [[10]]
    assert all(sum(map(len, texts)) <= 64 for texts in core.calls)
    assert len(core.calls) < len(sizes)
    assert all(vectors.shape == (1, 32) for vectors in got)


def test_one_bad_text_fails_its_own_caller_alone() -> None:
    embedder, core = gated("fake:embed")
    calls = [partial(embedder.embed, [text]) for text in (*TEXTS[:4], [97, 1 << 30])]
    *good, bad, wrong = together(embedder, core, [*calls, partial(embedder.rank, [TEXTS[0]])])
    assert isinstance(bad, BadOption)
    assert isinstance(wrong, Unsupported)
    assert all(isinstance(vectors, np.ndarray) for vectors in good)


def test_closing_waits_for_the_decode_and_refuses_who_waits() -> None:
    embedder, core = gated("fake:embed")
    closer = threading.Thread(target=embedder.close)

    def close() -> None:
        closer.start()
        while not embedder._closed:
            threading.Event().wait(0.001)

    first, *others = together(embedder, core, [partial(embedder.embed, [TEXTS[0]])] * 4, meanwhile=close)
    closer.join()
    assert isinstance(first, np.ndarray)
    assert all(isinstance(error, Closed) for error in others)


def test_an_interrupted_caller_leaves_the_others_their_texts() -> None:
    embedder, core = gated("fake:embed")
    core.interrupts = 1
    first, *others = together(embedder, core, [partial(embedder.embed, [TEXTS[0]])] * 4)
    assert isinstance(first, KeyboardInterrupt)
    assert all(isinstance(vectors, np.ndarray) for vectors in others)
    assert not embedder._waiting
