"""KV as bytes: spans out and in, whole and partial states, between sequences, contexts and layouts."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import BadOption, Unsupported
from tests.contract.core import Core, close, same, some_tokens

TOKENS = some_tokens(96)
BLOCK = 32
WINDOW = 32


def blocks(memory: Any, seq: int, n_tokens: int, part: str = "base") -> list[bytes]:
    return [memory.export_span(seq, at, at + BLOCK, part) for at in range(0, n_tokens, BLOCK)]


@pytest.fixture(
    params=[(True, True), (False, False), (True, False), (False, True)], ids=lambda pair: f"{pair[0]:d}{pair[1]:d}"
)
def layouts(request: pytest.FixtureRequest) -> tuple[bool, bool]:
    """Whether the source and the destination are unified."""
    source, destination = request.param
    return bool(source), bool(destination)


def test_exported_blocks_restore_a_sequence_exactly(core: Core, layouts: tuple[bool, bool]) -> None:
    source, destination = (core.context(kv_unified=unified) for unified in layouts)
    core.feed(source, 0, TOKENS)
    payloads = blocks(source.memory, 0, len(TOKENS))
    assert destination.memory.import_span(2, 0, payloads)
    assert destination.memory.pos_max(2) == 95
    assert destination.memory.used_cells == 96
    assert destination.n_rows_decoded == 0
    assert same(core.probe(destination, 2), core.probe(source, 0))


def test_blocks_can_be_imported_one_by_one(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, TOKENS)
    for i, payload in enumerate(blocks(context.memory, 0, len(TOKENS))):
        assert context.memory.import_span(1, i * BLOCK, [payload])
        assert context.memory.pos_max(1) == (i + 1) * BLOCK - 1
    assert same(core.probe(context, 1), core.probe(context, 0))


def test_a_restored_prefix_goes_on_like_a_decoded_one(core: Core, unified: bool) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, TOKENS)
    assert context.memory.import_span(1, 0, blocks(context.memory, 0, 64))
    core.feed(context, 1, TOKENS[64:])
    assert same(core.probe(context, 1), core.probe(context, 0))


def test_spans_survive_a_source_that_was_shared_cut_and_refilled(core: Core, unified: bool) -> None:
    """The cells of the source then lie out of order."""
    context = core.context(kv_unified=unified)
    core.feed(context, 1, TOKENS[:40])
    core.feed(context, 0, TOKENS[:32])
    context.memory.remove(1, 0, None)
    core.feed(context, 0, TOKENS[32:])
    other = core.context(kv_unified=unified)
    assert other.memory.import_span(0, 0, blocks(context.memory, 0, len(TOKENS)))
    assert close(core.probe(other, 0), core.probe(context, 0))


def test_the_bytes_of_a_span_depend_on_its_tokens_alone(core: Core) -> None:
    spans = []
    for unified in (True, False):
        context = core.context(kv_unified=unified)
        core.feed(context, 3, some_tokens(20))
        core.feed(context, 1, TOKENS)
        spans.append(context.memory.export_span(1, 32, 64))
    assert spans[0] == spans[1]


def test_a_full_memory_takes_no_span_and_stays_as_it_was(core: Core, unified: bool) -> None:
    source = core.context(n_seq_max=1, kv_unified=unified)
    core.feed(source, 0, some_tokens(320))
    tail = [source.memory.export_span(0, 224, 256), source.memory.export_span(0, 256, 288)]
    full = core.context(n_ctx=256, n_seq_max=1, kv_unified=unified)
    core.feed(full, 0, some_tokens(224))
    assert not full.memory.import_span(0, 224, tail)
    assert full.memory.pos_max(0) == 223
    assert full.memory.used_cells == 224
    assert full.memory.import_span(0, 224, tail[:1])


@pytest.mark.parametrize("p0", [0, 1, 31, 33, 64])
def test_a_span_must_start_where_the_sequence_ends(core: Core, unified: bool, p0: int) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, TOKENS)
    core.feed(context, 1, TOKENS[:32])
    payload = context.memory.export_span(0, 32, 64)
    with pytest.raises(BadOption):
        context.memory.import_span(1, p0, [payload])
    assert context.memory.pos_max(1) == 31


@pytest.mark.parametrize("damage", ["empty", "noise", "cut", "longer", "foreign"])
def test_bytes_that_are_no_span_of_this_model_are_refused(core: Core, unified: bool, damage: str) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, TOKENS)
    good = context.memory.export_span(0, 0, 32)
    foreign = core.context("window", kv_unified=unified)
    core.feed(foreign, 0, TOKENS)
    bad = {
        "empty": b"", "noise": bytes(range(256)) * 8, "cut": good[:-1], "longer": good + b"x",
        "foreign": foreign.memory.export_span(0, 0, 32, "window"),
    }[damage]  # fmt: skip
    with pytest.raises(BadOption):
        context.memory.import_span(1, 0, [good, bad])
    assert context.memory.pos_max(1) is None
    assert context.memory.used_cells == 96


def test_a_window_memory_is_restored_from_all_of_the_base_and_the_end_of_the_window(
    core: Core, layouts: tuple[bool, bool]
) -> None:
    source, destination = (core.context("window", kv_unified=unified) for unified in layouts)
    core.feed(source, 0, TOKENS)
    base = blocks(source.memory, 0, len(TOKENS))
    window = source.memory.export_span(0, len(TOKENS) - WINDOW, len(TOKENS), "window")
    assert destination.memory.import_span(1, 0, base)
    assert destination.memory.import_span(1, len(TOKENS) - WINDOW, [window], "window")
    assert destination.memory.pos_max(1) == 95
    assert same(core.probe(destination, 1), core.probe(source, 0))


def test_a_forgetful_window_still_exports_its_end(core: Core, unified: bool) -> None:
    options = {"swa_full": False, "n_ctx": 2048, "n_ubatch": 32, "kv_unified": unified}
    tokens = some_tokens(384)
    source, destination = core.context("window", **options), core.context("window", **options)
    core.feed(source, 0, tokens)
    with pytest.raises(BadOption):
        source.memory.export_span(0, 0, 32, "window")
    assert destination.memory.import_span(0, 0, blocks(source.memory, 0, len(tokens)))
    window = source.memory.export_span(0, len(tokens) - WINDOW, len(tokens), "window")
    assert destination.memory.import_span(0, len(tokens) - WINDOW, [window], "window")
    assert same(core.probe(destination, 0), core.probe(source, 0))


def test_a_restore_given_up_half_way_leaves_no_cells_behind(core: Core, unified: bool) -> None:
    context = core.context("window", kv_unified=unified)
    core.feed(context, 0, TOKENS)
    base = blocks(context.memory, 0, len(TOKENS))
    assert context.memory.import_span(1, 0, base)
    assert context.memory.remove(1, 0, None)
    assert context.memory.used_cells == 96
    assert context.memory.import_span(1, 0, base)


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_memory_without_a_window_has_no_window_part(core: Core, kind: str) -> None:
    context = core.context(kind)
    core.feed(context, 0, TOKENS)
    with pytest.raises(Unsupported):
        context.memory.export_span(0, 0, 32, "window")


def test_a_recurrent_memory_has_no_spans(core: Core, unified: bool) -> None:
    context = core.context("recurrent", kv_unified=unified)
    core.feed(context, 0, TOKENS)
    with pytest.raises(Unsupported):
        context.memory.export_span(0, 0, 32)
    with pytest.raises(Unsupported):
        context.memory.import_span(1, 0, [])


def test_a_hybrid_memory_is_restored_from_spans_and_a_partial_state(core: Core, layouts: tuple[bool, bool]) -> None:
    source, destination = (core.context("hybrid", kv_unified=unified) for unified in layouts)
    core.feed(source, 0, TOKENS)
    assert destination.memory.import_span(1, 0, blocks(source.memory, 0, len(TOKENS)))
    assert destination.memory.set_state(1, source.memory.state(0, partial=True), partial=True)
    assert destination.memory.pos_max(1) == 95
    assert same(core.probe(destination, 1), core.probe(source, 0))


def test_a_whole_state_restores_every_memory(core: Core, kind: str, unified: bool) -> None:
    source, destination = core.context(kind, kv_unified=unified), core.context(kind, kv_unified=unified)
    core.feed(source, 0, TOKENS)
    core.feed(destination, 1, some_tokens(10))
    assert destination.memory.set_state(1, source.memory.state(0))
    assert destination.memory.pos_max(1) == 95
    assert same(core.probe(destination, 1), core.probe(source, 0))


def test_a_state_can_be_taken_back(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, TOKENS)
    saved = context.memory.state(0)
    first = core.probe(context, 0)
    assert context.memory.set_state(0, saved)
    assert context.memory.pos_max(0) == 95
    assert same(core.probe(context, 0), first)


def test_a_state_needs_room(core: Core, unified: bool) -> None:
    source = core.context(kv_unified=unified, n_seq_max=1)
    core.feed(source, 0, some_tokens(320))
    small = core.context(n_ctx=256, n_seq_max=1, kv_unified=unified)
    assert not small.memory.set_state(0, source.memory.state(0))
    assert small.memory.pos_max(0) is None
    assert small.memory.used_cells == 0


@pytest.mark.parametrize("damage", ["empty", "noise", "cut"])
def test_bytes_that_are_no_state_are_refused(core: Core, kind: str, unified: bool, damage: str) -> None:
    context = core.context(kind, kv_unified=unified)
    core.feed(context, 0, TOKENS)
    good = context.memory.state(0)
    bad = {"empty": b"", "noise": bytes(range(256)) * 8, "cut": good[: len(good) // 2]}[damage]
    core.feed(context, 1, TOKENS[:8])
    assert not context.memory.set_state(1, bad)
    assert context.memory.pos_max(1) is None
    assert same(core.probe(context, 0), core.fresh(kind, TOKENS, kv_unified=unified))
