"""What comes back from disk equals what was never interrupted, for every kind of memory, to the last bit.

Each engine here has a cache of its own without RAM, so whatever a later one restores was read from a file. A restored
run is compared with the same request on an engine that has no cache: all its logits, and so its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from kvasir import native
from kvasir.engine import Event, offers
from tests.cache_real.rig import BLOCK, EXACT, Place, alone
from tests.engine_real.noise import check_bits
from tests.engine_real.rig import Taken
from tests.unit.engine.rig import prompt

LONG = prompt(150, salt=2)
LAYOUTS = ("unified", "split")


def next_turn(before: tuple[int, ...], said: Taken, salt: int = 8, n_tokens: int = 20) -> tuple[int, ...]:
    return (*before, *said.tokens, *prompt(n_tokens, salt=salt))


@pytest.mark.parametrize("restored_in", LAYOUTS)
@pytest.mark.parametrize("saved_in", LAYOUTS)
def test_a_turn_later_in_another_engine(place: Place, path: Path, saved_in: str, restored_in: str) -> None:
    """Another layout, another context size, other slots: to the last token that had run, and to the last bit."""
    with place.opened(path, layout=saved_in, slots=2, context_size=1024, **EXACT) as first:
        said = first.ask(LONG)
    turn = next_turn(LONG, said)
    with place.opened(path, layout=restored_in, slots=3, context_size=1536, **EXACT) as second:
        again = second.ask(turn)
        assert second.rig.counters.restored == 1
        assert second.cache.stats().bytes_read > 0
    assert again.done.usage.cached_tokens == len(LONG) + len(said.tokens) - 1
    check_bits(said, alone(path, LONG, **EXACT))
    check_bits(again, alone(path, turn, **EXACT))


def test_the_same_prompt_again(place: Place, kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without logits: restored to its last token but one, which runs for them; a window is not cut within a block."""
    monkeypatch.setattr(offers, "LOGITS_SHARE", 1 << 30)
    with place.opened(path, **EXACT) as first:
        said = first.ask(LONG)
    with place.opened(path, **EXACT) as second:
        again = second.ask(LONG)
    assert again.done.usage.cached_tokens == (len(LONG) // BLOCK * BLOCK if kind == "gemma3" else len(LONG) - 1)
    check_bits(again, said)


def test_the_same_prompt_again_says_its_first_token_at_once(
    place: Place, kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is decoded, and to the last bit; what follows runs from rows. A state lies one token earlier."""
    monkeypatch.setattr(offers, "LOGITS_SHARE", 0)
    with place.opened(path, **EXACT) as first:
        said = first.ask(LONG)
    with place.opened(path, **EXACT) as second:
        again = second.rig.submit(LONG, max_tokens=6)
        n_rows: list[int] = []
        put = again.put

        def noted(event: Event) -> None:
            n_rows.append(second.rig.context.n_rows_decoded)
            put(event)

        monkeypatch.setattr(again, "put", noted)
        second.rig.drain()
        assert n_rows[0] == 0
        assert second.rig.counters.first_tokens_stored == second.rig.counters.restored == 1
        assert second.cache.stats().hits_logits == 1
    n_cached = {"llama": len(LONG), "gemma3": len(LONG) // BLOCK * BLOCK}.get(kind, len(LONG) - 1)
    assert again.done.usage.cached_tokens == n_cached
    check_bits(again, said)
    check_bits(again, alone(path, LONG, **EXACT))


def test_beside_others_in_another_slot(place: Place, path: Path) -> None:
    """The slot a restore goes to lies among the cells of two streams that run."""
    with place.opened(path, **EXACT) as first:
        said = first.ask(LONG)
    turn = next_turn(LONG, said)
    with place.opened(path, slots=4, **EXACT) as second:
        others = [second.rig.submit(prompt(30 + i, salt=60 + i), max_tokens=90) for i in range(2)]
        while not all(other.tokens for other in others):
            second.rig.tick()
        late = second.rig.submit(turn, max_tokens=6)
        second.rig.drain()
        assert late.done.usage.cached_tokens == len(LONG) + len(said.tokens) - 1
        assert min(late.logits[0].shape) > 0
    check_bits(late, alone(path, turn, **EXACT))
    for i, other in enumerate(others):
        check_bits(other, alone(path, prompt(30 + i, salt=60 + i), max_tokens=90, **EXACT))


def test_a_branch_reuses_what_its_memory_allows(place: Place, kind: str, path: Path) -> None:
    """A prompt that parts in the middle: plain KV is cut at the token, a window at a block, a state at a snapshot.

    One token a tick stands on every boundary once, so that here every block has a snapshot.
    """
    with place.opened(path, **EXACT) as first:
        first.ask(LONG)
    branch = (*LONG[:100], *prompt(40, salt=9))
    assert branch[100] != LONG[100]
    with place.opened(path, **EXACT) as second:
        sink = second.ask(branch)
        cached = sink.done.usage.cached_tokens
    assert cached == {"llama": 100, "gemma3": 96, "mamba": 96, "lfm2": 96}[kind]
    check_bits(sink, alone(path, branch, **EXACT))


def test_a_prompt_that_shares_a_system_prompt(place: Place, path: Path) -> None:
    """A cold save ends on a boundary, with a snapshot where states need one: the next prompt starts there."""
    system = prompt(3 * BLOCK + 2, salt=5)
    with place.opened(path, **EXACT) as first:
        first.ask(system + prompt(20, salt=30))
    other = system + prompt(20, salt=31)
    with place.opened(path, **EXACT) as second:
        sink = second.ask(other)
        assert sink.done.usage.cached_tokens >= 3 * BLOCK
    check_bits(sink, alone(path, other, **EXACT))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_default_shapes_and_types_continue_as_a_parked_turn_does(place: Place, path: Path, layout: str) -> None:
    """F16, chunks, the default strategy: the second turn of one engine and of two are the same work, so the same bits.

    A window is compacted by a restore, so there V is BF16: what is summed is then the same, in the same order.
    """
    options: dict[str, Any] = {"layout": layout, "slots": 2, "type_v": "bf16" if "gemma" in path.name else "f16"}
    with place.opened(path, **options) as whole:
        said = whole.ask(LONG)
        turn = next_turn(LONG, said)
        wanted = whole.ask(turn)
        assert whole.rig.counters.shared_parked == 1
    fresh = Place(place.folder / "fresh")
    with fresh.opened(path, **options) as first:
        check_bits(first.ask(LONG), said)
    with fresh.opened(path, **options) as second:
        again = second.ask(turn)
    assert again.done.usage.cached_tokens == wanted.done.usage.cached_tokens == len(LONG) + len(said.tokens) - 1
    check_bits(again, wanted)


def test_a_conversation_of_many_engines(place: Place, path: Path) -> None:
    """Every turn in an engine that has just been opened: each hits to the last token that had run."""
    tokens = prompt(40, salt=3)
    n_run = 0
    for i in range(5):
        with place.opened(path, layout=LAYOUTS[i % 2], **EXACT) as each:
            sink = each.ask(tokens, max_tokens=11)
        check_bits(sink, alone(path, tokens, max_tokens=11, **EXACT))
        assert sink.done.usage.cached_tokens == n_run
        n_run = len(tokens) + len(sink.tokens) - 1
        tokens = next_turn(tokens, sink, salt=20 + i, n_tokens=17)


def test_a_request_cut_short_goes_on_with_the_draws_it_would_have_had(place: Place, path: Path) -> None:
    """The engine closes in the middle of a turn; the rest is drawn by another, and the whole is one turn."""
    options: dict[str, Any] = {"temperature": 0.9, "seed": 7}
    whole = alone(path, LONG, max_tokens=20, **options, **EXACT)
    with place.opened(path, **EXACT) as first:
        cut = first.rig.submit(LONG, max_tokens=20, **options)
        while len(cut.tokens) < 9:
            first.rig.tick()
        first.rig.loop.stop()
        first.rig.loop.shut()
        assert first.cache.stats().saves_shutdown > 0
        n_said = len(cut.tokens)
    assert cut.tokens == whole.tokens[:n_said]
    with place.opened(path, **EXACT) as second:
        rest = second.rig.submit(LONG + tuple(cut.tokens), max_tokens=20 - n_said, **options)
        cast(native.Sampler, second.rig.sequences[rest.id].sampler).seek(n_said)
        second.rig.drain()
    assert rest.done.usage.cached_tokens == len(LONG) + n_said - 1
    assert cut.tokens + rest.tokens == whole.tokens


def test_a_longer_prompt_before_hides_no_snapshot(place: Place, kind: str, path: Path) -> None:
    """A prompt that runs over a boundary in one chunk leaves a block without a state there; the next ones need one."""
    long = prompt(300, salt=2)
    with place.opened(path) as first:
        first.ask(long)
    turns = [long[: 4 * BLOCK] + prompt(10, salt=50 + i) for i in range(2)]
    for tokens in turns:
        with place.opened(path) as each:
            sink = each.ask(tokens)
    assert sink.done.usage.cached_tokens == 4 * BLOCK - (kind == "lfm2")
    assert sink.tokens == alone(path, turns[-1]).tokens
