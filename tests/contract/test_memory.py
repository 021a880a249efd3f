"""Sequences in memory: share, remove, copy, keep, shift, and what each kind of memory cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir.errors import BadOption, Unsupported
from tests.contract.core import PROBE, Core, close, same, some_tokens

PREFIX = some_tokens(64)
REST = some_tokens(100)[64:]
# Small batches and many cells, so that a window memory which does not keep everything really forgets.
FORGETFUL = {"swa_full": False, "n_ctx": 2048, "n_ubatch": 32}


def test_an_empty_sequence_has_no_positions(core: Core, kind: str, unified: bool) -> None:
    memory = core.context(kind, kv_unified=unified).memory
    assert memory.pos_min(0) is None
    assert memory.pos_max(0) is None
    assert memory.used_cells == 0


def test_positions_and_cells_follow_what_was_decoded(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 1, PREFIX)
    assert context.memory.pos_max(1) == 63
    # A state cannot be taken back, so the only position such a memory can vouch for is its last.
    assert context.memory.pos_min(1) == (63 if kind in ("recurrent", "hybrid") else 0)
    assert context.memory.pos_max(0) is None
    assert context.memory.used_cells == (1 if kind == "recurrent" else 64)
    assert context.memory.n_cells >= context.memory.used_cells


def test_a_window_memory_knows_its_window(core: Core, kind: str) -> None:
    assert core.context(kind).memory.window == (32 if kind == "window" else 0)


def test_a_shared_prefix_is_as_good_as_one_that_was_decoded(core: Core, unified: bool) -> None:
    for kind in ("plain", "window"):
        context = core.context(kind, kv_unified=unified)
        core.feed(context, 0, PREFIX)
        core.feed(context, 0, REST)  # the source has gone on
        assert context.memory.share(0, 1, len(PREFIX))
        assert context.memory.pos_max(1) == len(PREFIX) - 1
        assert same(core.probe(context, 1), core.fresh(kind, PREFIX, kv_unified=unified))
        assert same(core.probe(context, 0), _fresh_in_two_parts(core, kind, unified))


def _fresh_in_two_parts(core: Core, kind: str, unified: bool) -> Any:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 0, REST)
    return core.probe(context, 0)


def test_a_whole_sequence_can_be_shared_by_every_memory(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    assert context.memory.share(0, 2, len(PREFIX))
    assert context.memory.pos_max(2) == len(PREFIX) - 1
    expected = core.fresh(kind, PREFIX, kv_unified=unified)
    assert same(core.probe(context, 2), expected)
    assert same(core.probe(context, 0), expected)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_memory_with_a_state_cannot_share_a_part(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 1, REST)
    assert not context.memory.share(0, 1, len(PREFIX) - 1)
    assert context.memory.pos_max(1) is None
    assert same(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified))


def test_sharing_costs_cells_only_in_the_split_layout(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    context.memory.share(0, 1, 40)
    assert context.memory.used_cells == (64 if unified else 104)
    context.memory.remove(0, 0, None)
    assert context.memory.used_cells == 40
    context.memory.remove(1, 0, None)
    assert context.memory.used_cells == 0


def test_sharing_replaces_what_the_destination_held(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 1, REST)
    assert context.memory.share(0, 1, len(PREFIX))
    assert same(core.probe(context, 1), core.fresh(kind, PREFIX, kv_unified=unified))


def test_sharing_nothing_empties_the_destination(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 1, REST)
    assert context.memory.share(0, 1, 0)
    assert context.memory.pos_max(1) is None


def test_more_than_there_is_cannot_be_shared(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    with pytest.raises(BadOption):
        context.memory.share(0, 1, len(PREFIX) + 1)
    assert context.memory.pos_max(1) is None


def test_one_source_serves_many(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    expected = core.fresh("plain", PREFIX, kv_unified=unified)
    assert all(context.memory.share(0, dst, len(PREFIX)) for dst in (1, 2, 3))
    assert all(same(core.probe(context, dst), expected) for dst in (1, 2, 3))


def test_sharers_do_not_see_what_the_others_add(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    context.memory.share(0, 1, len(PREFIX))
    core.feed(context, 0, REST)
    assert same(core.probe(context, 1), core.fresh("plain", PREFIX, kv_unified=unified))


def test_a_sequence_cut_back_goes_on_as_if_the_rest_had_never_been(core: Core, unified: bool) -> None:
    for kind in ("plain", "window"):
        context = core.context(kind, kv_unified=unified)
        core.feed(context, 0, PREFIX)
        core.feed(context, 0, REST)
        assert context.memory.remove(0, len(PREFIX), None)
        assert context.memory.pos_max(0) == len(PREFIX) - 1
        assert same(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified))


def test_a_hole_changes_what_comes_next(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    assert context.memory.remove(0, 10, 20)
    assert context.memory.used_cells == 54
    assert context.memory.pos_max(0) == 63
    assert not same(core.probe(context, 0), core.fresh("plain", PREFIX, kv_unified=unified))


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_memory_with_a_state_drops_all_or_nothing(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    assert not context.memory.remove(0, 10, None)
    assert not context.memory.remove(0, 0, 10)
    assert context.memory.pos_max(0) == 63
    assert same(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified))
    assert context.memory.remove(0, 0, None)
    assert context.memory.pos_max(0) is None


def test_removing_what_is_not_there_changes_nothing(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    assert context.memory.remove(0, 64, None)
    assert context.memory.remove(1, 0, None)
    assert context.memory.remove(0, 5, 5)
    assert same(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified))


def test_a_window_that_was_forgotten_cannot_be_gone_back_to(core: Core, unified: bool) -> None:
    context = core.context("window", kv_unified=unified, **FORGETFUL)
    tokens = some_tokens(400)
    core.feed(context, 0, tokens)
    assert not context.memory.remove(0, 100, None)
    assert context.memory.pos_max(0) == 399
    assert not context.memory.share(0, 1, 100)
    assert context.memory.pos_max(1) is None
    assert same(core.probe(context, 0), core.fresh("window", tokens, kv_unified=unified, **FORGETFUL))


def test_a_window_that_is_still_there_can_be_gone_back_to(core: Core, unified: bool) -> None:
    context = core.context("window", kv_unified=unified, **FORGETFUL)
    tokens = some_tokens(384)
    core.feed(context, 0, tokens)
    core.feed(context, 0, [PROBE])
    assert context.memory.remove(0, 384, None)
    assert context.memory.share(0, 1, 384)
    expected = core.fresh("window", tokens, kv_unified=unified, **FORGETFUL)
    assert close(core.probe(context, 0), expected)
    assert close(core.probe(context, 1), expected)


def test_a_forgetful_window_says_the_same_as_one_that_keeps_all(core: Core, unified: bool) -> None:
    tokens = some_tokens(400)
    keeps = core.fresh("window", tokens, kv_unified=unified, n_ctx=2048, n_ubatch=32)
    assert close(core.fresh("window", tokens, kv_unified=unified, **FORGETFUL), keeps)


def test_a_copy_is_the_whole_sequence(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 3, REST)
    context.memory.copy(0, 3)
    assert context.memory.pos_max(3) == 63
    assert same(core.probe(context, 3), core.fresh(kind, PREFIX, kv_unified=unified))


def test_keeping_one_drops_the_others(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    for seq in range(3):
        core.feed(context, seq, PREFIX)
    context.memory.keep(1)
    assert [context.memory.pos_max(seq) for seq in range(3)] == [None, 63, None]
    assert close(core.probe(context, 1), core.fresh(kind, PREFIX, kv_unified=unified))


def test_clearing_drops_everything(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    core.feed(context, 1, REST)
    context.memory.clear()
    assert context.memory.used_cells == 0
    core.feed(context, 0, PREFIX)
    assert same(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified))


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_shifting_a_whole_sequence_does_not_change_what_comes_next(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, PREFIX)
    assert context.memory.can_shift
    context.memory.shift(0, 0, None, 100)
    assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (100, 163)
    context.memory.flush()
    assert np.allclose(core.probe(context, 0), core.fresh(kind, PREFIX, kv_unified=unified), atol=0.1)


def test_closing_a_hole_at_the_start_equals_leaving_it_open(core: Core, unified: bool) -> None:
    """Nothing precedes the hole, so no distance between what is left changes."""
    contexts = [core.context(kv_unified=unified) for _ in range(2)]
    for context in contexts:
        core.feed(context, 0, PREFIX)
        assert context.memory.remove(0, 0, 16)
    closed, left_open = contexts
    closed.memory.shift(0, 16, None, -16)
    assert (closed.memory.pos_min(0), closed.memory.pos_max(0)) == (0, 47)
    assert (left_open.memory.pos_min(0), left_open.memory.pos_max(0)) == (16, 63)
    said = core.probe(closed, 0)
    assert np.allclose(said, core.probe(left_open, 0), atol=0.1)
    assert not np.allclose(said, core.fresh("plain", PREFIX[16:], kv_unified=unified), atol=0.1)  # it saw more


def test_shifting_one_sequence_leaves_those_it_shares_cells_with(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    context.memory.share(0, 1, len(PREFIX))
    context.memory.shift(0, 0, None, 8)
    assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (8, 71)
    assert (context.memory.pos_min(1), context.memory.pos_max(1)) == (0, 63)
    assert context.memory.used_cells == 128
    assert close(core.probe(context, 1), core.fresh("plain", PREFIX, kv_unified=unified))


def test_shifting_a_shared_sequence_keeps_its_holes(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    context.memory.share(0, 1, len(PREFIX))
    assert context.memory.remove(0, 30, 40)
    context.memory.shift(0, 0, None, 8)
    assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (8, 71)
    assert context.memory.export_span(0, 48, 72)
    with pytest.raises(BadOption):
        context.memory.export_span(0, 38, 48)


def test_without_room_for_cells_of_its_own_a_shared_sequence_is_not_shifted(core: Core) -> None:
    context = core.context(n_ctx=256, n_seq_max=2)
    tokens = some_tokens(200)
    core.feed(context, 0, tokens)
    context.memory.share(0, 1, 200)
    with pytest.raises(Unsupported):
        context.memory.shift(0, 0, None, 8)
    assert (context.memory.pos_min(0), context.memory.pos_max(0)) == (0, 199)
    assert context.memory.used_cells == 200
    assert close(core.probe(context, 0), core.fresh("plain", tokens, n_ctx=256, n_seq_max=2))


def test_a_shift_onto_positions_that_are_taken_is_refused(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    with pytest.raises(BadOption):
        context.memory.shift(0, 20, None, -10)
    with pytest.raises(BadOption):
        context.memory.shift(0, 10, 20, 5)
    assert same(core.probe(context, 0), core.fresh("plain", PREFIX, kv_unified=unified))


CANNOT_SHIFT: list[tuple[str, dict[str, Any]]] = [
    ("recurrent", {}), ("hybrid", {}), ("window", {"swa_full": False}), ("plain", {"type_k": "bf16"}),
    ("plain", {"type_k": "q8_0"}), ("plain", {"rope_scaling": "yarn"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), CANNOT_SHIFT, ids=str)
def test_shifting_is_refused_where_it_would_be_wrong(core: Core, kind: str, options: dict[str, Any]) -> None:
    context = core.context(kind, **options)
    core.feed(context, 0, PREFIX)
    assert not context.memory.can_shift
    with pytest.raises(Unsupported):
        context.memory.shift(0, 0, None, 1)
    assert context.memory.pos_max(0) == 63


@pytest.mark.parametrize("seq", [-1, 4, 255, 1000])
def test_sequences_that_do_not_exist_are_refused(core: Core, seq: int, unified: bool) -> None:
    memory = core.context(kv_unified=unified).memory
    uses: list[tuple[str, tuple[Any, ...]]] = [
        ("remove", (seq, 0, None)), ("share", (seq, 0, 1)), ("share", (0, seq, 1)), ("copy", (seq, 0)),
        ("copy", (0, seq)), ("keep", (seq,)), ("shift", (seq, 0, None, 1)), ("pos_min", (seq,)), ("pos_max", (seq,)),
        ("export_span", (seq, 0, 1)), ("import_span", (seq, 0, [])), ("state", (seq,)), ("set_state", (seq, b"")),
    ]  # fmt: skip
    for name, arguments in uses:
        with pytest.raises(BadOption):
            getattr(memory, name)(*arguments)


def test_impossible_spans_are_refused(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, PREFIX)
    memory = context.memory
    uses: list[tuple[str, tuple[Any, ...]]] = [
        ("remove", (0, -1, None)), ("remove", (0, 5, 2)), ("share", (0, 0, 5)), ("share", (0, 1, -1)),
        ("shift", (0, 0, None, -1)), ("shift", (0, -1, None, 1)), ("export_span", (0, 0, 65)),
        ("export_span", (0, -1, 5)), ("export_span", (0, 5, 5)), ("export_span", (0, 5, 4)),
        ("export_span", (0, 0, 5, "middle")), ("import_span", (0, 0, [], "middle")),
    ]  # fmt: skip
    for name, arguments in uses:
        with pytest.raises(BadOption):
            getattr(memory, name)(*arguments)
    assert same(core.probe(context, 0), core.fresh("plain", PREFIX, kv_unified=unified))
