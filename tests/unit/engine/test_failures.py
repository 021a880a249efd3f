"""A step that fails costs only the sequences that cannot run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.engine.sequence import MOVES, State
from kvasir.errors import BadGrammar, BadOption, ContextFull, ModelError
from kvasir.native import fake
from tests.unit.engine.rig import Rig, expected, prompt

KINDS = ("fake:plain", "fake:window", "fake:recurrent", "fake:hybrid")


def break_steps(rig: Rig, is_bad: Callable[[list[fake.Row]], str | None]) -> None:
    """Let every step fail for which `is_bad` names a status."""
    real = rig.context.step

    def step(rows: list[fake.Row]) -> fake.Step:
        status = is_bad(rows)
        return real(rows) if status is None else fake.Step(status, [], [], [])

    rig.context.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("status", ["no_room", "failed", "bad_batch", "aborted"])
@pytest.mark.parametrize("path", KINDS)
def test_one_failed_step_is_repaired_and_nobody_notices(path: str, status: str) -> None:
    rig = Rig(path)
    sinks = [rig.submit(prompt(20 + i, salt=i), max_tokens=12) for i in range(4)]
    for _ in range(5):
        rig.tick(2)
        rig.context.fail_next(status)
    rig.drain()
    rig.check_idle()
    for i, sink in enumerate(sinks):
        assert sink.tokens == expected(path, prompt(20 + i, salt=i), max_tokens=12)[0]
    assert (rig.loop.meter.counters.retries > 0) == (status != "aborted")


@pytest.mark.parametrize("path", KINDS)
def test_the_sequence_that_cannot_run_fails_alone(path: str) -> None:
    rig = Rig(path, slots=8, context_size=1024)
    sinks = [rig.submit(prompt(10 + i, salt=i), max_tokens=12, stop_tokens=frozenset()) for i in range(8)]
    break_steps(
        rig, lambda rows: "failed" if any(row.seq == 5 and row.pos + len(row.tokens) > 20 for row in rows) else None
    )
    rig.drain()
    rig.check_idle()
    assert isinstance(sinks[5].error, ModelError)
    for i in {0, 1, 2, 3, 4, 6, 7}:
        made, _ = expected(path, prompt(10 + i, salt=i), max_tokens=12, stop_tokens=frozenset())
        assert sinks[i].tokens == made


def test_no_room_cuts_the_chunk_and_then_fails_with_both_numbers() -> None:
    rig = Rig()
    sink = rig.submit(prompt(40), max_tokens=4)
    break_steps(rig, lambda rows: "no_room" if rows[0].pos + len(rows[0].tokens) > 30 else None)
    rig.drain()
    rig.check_idle()
    assert isinstance(sink.error, ContextFull)
    assert sink.error.limit == 512
    assert rig.context.n_rows_decoded == 30  # everything that had room ran


def test_rows_of_a_step_that_failed_half_way_are_adopted() -> None:
    """llama.cpp keeps the sub-batches before the one that failed; the ledger must follow."""
    rig = Rig()
    sink = rig.submit(prompt(40), max_tokens=6)
    real, calls = rig.context.step, []

    def step(rows: list[fake.Row]) -> fake.Step:
        calls.append(len(rows))
        if len(calls) == 1:
            real([fake.Row(rows[0].seq, rows[0].pos, rows[0].tokens)])  # all of it ran, and nothing was sampled
            return fake.Step("failed", [], [], [])
        return real(rows)

    rig.context.step = step  # type: ignore[method-assign]
    rig.drain()
    rig.check_idle()
    assert sink.tokens == expected("fake:plain", prompt(40), max_tokens=6)[0]
    assert rig.loop.stats().rows_lost == 40
    assert rig.loop.stats().rows_decoded == rig.context.n_rows_decoded


def test_an_error_raised_by_the_core_fails_only_its_sequence() -> None:
    rig = Rig()
    sinks = [rig.submit(prompt(10, salt=i), max_tokens=4) for i in range(3)]
    real = rig.context.step

    def step(rows: list[fake.Row]) -> fake.Step:
        if any(row.seq == 1 for row in rows):
            raise BadOption("slot 1 is not liked")
        return real(rows)

    rig.context.step = step  # type: ignore[method-assign]
    rig.drain()
    assert isinstance(sinks[1].error, BadOption)
    assert sinks[0].tokens == expected("fake:plain", prompt(10), max_tokens=4)[0]
    assert sinks[2].tokens == expected("fake:plain", prompt(10, salt=2), max_tokens=4)[0]


def test_a_grammar_that_admits_nothing_fails_its_request() -> None:
    rig = Rig()
    real = rig.context.step

    def step(rows: list[fake.Row]) -> fake.Step:
        made = real(rows)
        return fake.Step("ok", [None for _ in rows], made.logprobs, ["the grammar admits no token" for _ in rows])

    rig.context.step = step  # type: ignore[method-assign]
    sink = rig.submit(prompt(10))
    rig.drain()
    assert isinstance(sink.error, BadGrammar)


def test_no_move_leaves_done_and_a_forbidden_move_is_caught() -> None:
    rig = Rig()
    sink = rig.submit(prompt(4))
    rig.tick()
    seq = rig.sequence(sink)
    rig.drain()
    assert seq.state is State.DONE
    assert not MOVES[State.DONE]
    with pytest.raises(AssertionError, match="cannot go from DONE to DECODE"):
        seq.move(State.DECODE)


def test_a_ledger_that_lies_is_found_when_idle_and_mended(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.context.step([fake.Row(2, 0, [97, 98])])
    rig.loop.check()
    assert "slot 2 holds 2 tokens, its ledger says 0" in caplog.text
    assert rig.loop.meter.counters.ledger_faults == 1
    assert rig.context.memory.used_cells == 0


def test_a_ledger_that_lies_is_fatal_in_debug() -> None:
    rig = Rig(debug=True)
    sink = rig.submit(prompt(4))
    rig.tick()
    rig.sequence(sink).n_decoded -= 1
    with pytest.raises(AssertionError, match="ledger"):
        rig.loop.check()


@pytest.mark.parametrize("layout", ["unified", "split"])
def test_cells_that_the_context_has_and_the_memory_does_not_are_a_fault(layout: str) -> None:
    rig = Rig(layout=layout)
    rig.submit(prompt(10))
    rig.tick()
    shared = layout == "unified"
    assert rig.loop.runner.fault(rig.loop.residents, shared=shared) is None
    rig.context.n_ctx += 1
    fault = rig.loop.runner.fault(rig.loop.residents, shared=shared)
    assert fault == "10 of 512 cells are in use, the context was made with 513"
