"""Through the Python API, in both layouts: stop strings over several tokens, characters over several ticks, n."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvasir
from kvasir.engine import Admitted, Ended, FirstToken, Queued, Ticked

PROMPT = "Once upon a time"


@pytest.fixture
def model(tiny_llama: Path, layout: str) -> Iterator[kvasir.Model]:
    with kvasir.load(tiny_llama, context_size=2048, slots=4, layout=layout, threads=1) as opened:
        yield opened


def test_a_stop_string_over_three_tokens(model: kvasir.Model) -> None:
    """Each token alone is harmless text; only the three together end the stream, and none of them is shown."""
    free = model.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=40)
    pieces = [model.detokenize([token]) for token in free.tokens]
    at = next(
        i for i in range(8, 37) if "".join(pieces[: i + 3]).find("".join(pieces[i : i + 3])) == len("".join(pieces[:i]))
    )
    stop = "".join(pieces[at : at + 3])
    with ThreadPoolExecutor(2) as pool:  # somebody else is in the batch all the time
        other = pool.submit(model.generate, "A river", max_tokens=200, ignore_eos=True, seed=1)
        stopped = model.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=40, stop=[stop])
        other.result()
    assert stopped.text == "".join(pieces[:at])
    assert stopped.finish_reason == "stop"
    assert stopped.stop == stop
    again = model.generate(PROMPT, temperature=0, ignore_eos=True, max_tokens=40)
    assert again.tokens == free.tokens
    assert again.usage.cached_tokens > 0


def test_a_character_over_four_ticks_comes_whole(model: kvasir.Model) -> None:
    wanted = "é😀ß😀"
    grammar = f'root ::= "{wanted}"'
    stream = model.stream(PROMPT, grammar=grammar, max_tokens=20)
    beside = model.stream("A river", max_tokens=20, ignore_eos=True)
    pieces = list(stream)
    beside.result()
    assert "".join(pieces) == wanted
    assert all("\ufffd" not in piece for piece in pieces)
    result = model.generate(PROMPT, grammar=grammar, max_tokens=20)
    assert result.text == wanted
    assert len(result.tokens) == 12  # a token each byte, so an emoji took four ticks


def test_a_character_cut_off_in_its_middle_is_not_lost_in_silence(model: kvasir.Model) -> None:
    result = model.generate(PROMPT, grammar='root ::= "a😀"', max_tokens=3)
    assert result.finish_reason == "length"
    assert result.text.startswith("a")
    assert len(result.tokens) == 3


def test_n_completions_equal_n_requests(model: kvasir.Model) -> None:
    several = model.generate(PROMPT, n=4, seed=11, max_tokens=16, ignore_eos=True)
    assert len({each.text for each in several}) > 1
    for i, each in enumerate(several):
        single = model.generate(PROMPT, seed=11 + i, max_tokens=16, ignore_eos=True, cache=False)
        assert each.seed == single.seed == 11 + i
        assert each.tokens == single.tokens


def test_an_observer_gets_every_step_of_a_request_and_every_tick(tiny_llama: Path, layout: str) -> None:
    seen: list[object] = []
    with kvasir.load(
        tiny_llama, context_size=2048, layout=layout, threads=1, cache=False, observe=seen.append
    ) as model:
        model.generate(PROMPT, max_tokens=4, ignore_eos=True)
        n_prompt = len(model.tokenize(PROMPT))
    steps = [event for event in seen if not isinstance(event, Ticked)]
    assert [type(event) for event in steps] == [Queued, Admitted, FirstToken, Ended]
    ended = steps[-1]
    assert isinstance(ended, Ended)
    assert (ended.how, ended.n_prompt, ended.n_generated) == ("length", n_prompt, 4)
    ticks = [event for event in seen if isinstance(event, Ticked)]
    assert [(tick.n_prefill_rows, tick.n_decode_rows) for tick in ticks] == [(n_prompt, 0)] + [(0, 1)] * 3
    assert [tick.cells_used for tick in ticks] == [n_prompt + i for i in range(4)]


def test_an_observer_gets_the_events_of_every_worker(tiny_llama: Path) -> None:
    threads: set[int] = set()

    def observe(event: object) -> None:
        if isinstance(event, FirstToken):
            threads.add(threading.get_ident())

    with kvasir.Service.load(tiny_llama, workers=2, context_size=512, threads=1, observe=observe) as service:
        for _ in range(2):
            session = service.create_session(ignore_eos=True)
            session.append_input(PROMPT)
            for _ in session.generate_stream(max_new_tokens=3):
                pass
    assert len(threads) == 2


def test_an_observer_that_raises_hurts_nobody(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(event: object) -> None:
        raise RuntimeError("not me")

    with kvasir.load(tiny_llama, observe=refuse, threads=1, context_size=512, cache=False) as model:
        for _ in range(2):
            assert model.generate(PROMPT, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    assert sum(record.name == "kvasir.engine.events" for record in caplog.records) == 1
