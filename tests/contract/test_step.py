"""One step: what it returns, what it refuses, what it counts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvasir.errors import BadOption, KvasirError
from tests.contract.core import PROBE, Core, same, some_tokens


def test_a_step_returns_one_entry_per_row(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    rows = [
        core.row(0, 0, some_tokens(5), sampler=core.sampler(), logprobs=2),
        core.row(1, 0, some_tokens(9)),
        core.row(2, 0, [PROBE], output=True),
    ]
    step = context.step(rows)
    assert step.status == "ok"
    assert step.errors == [None, None, None]
    assert step.tokens[0] is not None
    assert step.tokens[1:] == [None, None]
    assert step.logprobs[0] is not None
    assert step.logprobs[1:] == [None, None]
    assert step.decode_s >= 0
    assert step.sample_s >= 0


def test_logits_belong_to_their_row(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    texts = [some_tokens(3), some_tokens(7)[2:], [PROBE]]
    context.step([core.row(seq, 0, text, output=True) for seq, text in enumerate(texts)])
    for seq, text in enumerate(texts):
        alone = core.context(kind, kv_unified=unified)
        alone.step([core.row(0, 0, text, output=True)])
        assert np.allclose(context.logits(seq), alone.logits(0), atol=1e-2)


def test_logits_are_a_copy_of_the_right_shape(core: Core) -> None:
    context = core.context()
    context.step([core.row(0, 0, [PROBE], output=True)])
    logits = context.logits(0)
    assert logits.shape == (core.model().vocab.n_tokens,)
    assert logits.dtype == np.float32
    before = logits.copy()
    logits[:] = 0
    assert same(context.logits(0), before)


def test_stored_logits_are_sampled_as_if_their_row_had_run(core: Core, kind: str) -> None:
    context = core.context(kind)
    for seed, temperature in ((1, 0.0), (2, 1.2), (3, 1.2)):
        there, later = (
            core.sampler(seed=seed, temperature=temperature),
            core.sampler(seed=seed, temperature=temperature),
        )
        context.memory.clear()
        step = context.step([core.row(0, 0, some_tokens(9), sampler=there, logprobs=2)])
        stored = context.logits(0).tobytes()
        n_rows = context.n_rows_decoded
        again = context.sample_stored(later, stored, 2)
        assert (again.status, again.tokens, again.errors) == ("ok", step.tokens, [None])
        assert again.logprobs[0].logprob == step.logprobs[0].logprob
        assert again.logprobs[0].top == step.logprobs[0].top
        assert context.sample_stored(core.sampler(), stored).logprobs == [None]
        assert context.n_rows_decoded == n_rows
        assert later.n_draws == there.n_draws == 1
        assert same(context.logits(0), np.frombuffer(stored, np.float32))


def test_stored_logits_that_do_not_fit_are_refused(core: Core) -> None:
    context, sampler = core.context(), core.sampler()
    n_bytes = 4 * core.model().vocab.n_tokens
    for wrong in (b"", bytes(n_bytes - 1), bytes(n_bytes - 4), bytes(n_bytes + 1)):
        with pytest.raises(BadOption, match="logits"):
            context.sample_stored(sampler, wrong)
    with pytest.raises(BadOption, match="logprobs"):
        context.sample_stored(sampler, bytes(n_bytes), -1)
    with pytest.raises((TypeError, AttributeError)):
        context.sample_stored(None, bytes(n_bytes))
    assert sampler.n_draws == 0
    context.close()
    with pytest.raises(KvasirError, match="closed"):
        context.sample_stored(sampler, bytes(n_bytes))


def test_the_same_tokens_give_the_same_logits(core: Core, kind: str, unified: bool) -> None:
    tokens = some_tokens(70)
    assert same(core.fresh(kind, tokens, kv_unified=unified), core.fresh(kind, tokens, kv_unified=unified))


def test_every_earlier_token_counts(core: Core, kind: str) -> None:
    tokens = some_tokens(20)
    other = [tokens[0] + 1, *tokens[1:]]
    assert not same(core.fresh(kind, tokens), core.fresh(kind, other))


@pytest.mark.parametrize("row", [-1, 0, 1, 7])
def test_a_row_without_output_has_no_logits(core: Core, row: int) -> None:
    context = core.context()
    context.step([core.row(0, 0, [PROBE])])
    with pytest.raises(BadOption):
        context.logits(row)


def test_there_are_no_logits_before_the_first_step(core: Core) -> None:
    with pytest.raises(BadOption):
        core.context().logits(0)


BAD_ROWS: list[list[tuple[int, int, list[int]]]] = [
    [],
    [(0, 0, [])],
    [(-1, 0, [PROBE])],
    [(4, 0, [PROBE])],
    [(0, -1, [PROBE])],
    [(0, 0, [-1])],
    [(0, 0, [1 << 20])],
    [(0, 0, [PROBE] * 513)],
    [(0, 0, [PROBE] * 300), (1, 0, [PROBE] * 300)],
    [(0, 0, [PROBE]), (0, 1, [PROBE])],
]


@pytest.mark.parametrize("rows", BAD_ROWS)
def test_rows_that_would_trip_an_assertion_are_refused(core: Core, rows: list[tuple[int, int, list[int]]]) -> None:
    context = core.context()
    with pytest.raises(BadOption):
        context.step([core.row(*row) for row in rows])
    assert context.memory.used_cells == 0
    assert context.n_rows_decoded == 0


def test_a_negative_number_of_logprobs_is_refused(core: Core) -> None:
    with pytest.raises(BadOption):
        core.context().step([core.row(0, 0, [PROBE], sampler=core.sampler(), logprobs=-1)])


@pytest.mark.parametrize("pos", [0, 2, 9, 11, 500])
def test_positions_must_continue_where_the_sequence_ends(core: Core, unified: bool, pos: int) -> None:
    context = core.context(kv_unified=unified)
    core.feed(context, 0, some_tokens(10))
    step = context.step([core.row(0, pos, [PROBE], sampler=core.sampler())])
    assert step.status == "bad_batch"
    assert step.tokens == [None]
    assert context.memory.pos_max(0) == 9
    assert context.n_rows_decoded == 10
    assert same(core.probe(context, 0), core.fresh("plain", some_tokens(10), kv_unified=unified))


def test_a_full_memory_has_no_room_and_stays_as_it_was(core: Core, unified: bool) -> None:
    context = core.context(n_ctx=256, n_seq_max=1, kv_unified=unified)
    core.feed(context, 0, some_tokens(250))
    step = context.step([core.row(0, 250, some_tokens(10), sampler=core.sampler())])
    assert step.status == "no_room"
    assert step.tokens == [None]
    assert context.memory.pos_max(0) == 249
    assert context.memory.used_cells == 250
    assert context.n_rows_decoded == 250
    assert context.step([core.row(0, 250, some_tokens(6))]).status == "ok"
    assert context.step([core.row(0, 256, [PROBE])]).status == "no_room"


def test_one_sequence_may_use_all_cells_only_when_they_are_unified(core: Core, unified: bool) -> None:
    context = core.context(n_ctx=512, n_seq_max=2, kv_unified=unified)
    assert context.n_ctx == 512
    assert context.n_ctx_seq == (512 if unified else 256)
    core.feed(context, 0, some_tokens(256))
    assert context.step([core.row(0, 256, [PROBE])]).status == ("ok" if unified else "no_room")


def test_in_the_split_layout_a_full_sequence_leaves_room_for_others(core: Core) -> None:
    context = core.context(n_ctx=512, n_seq_max=2, kv_unified=False)
    core.feed(context, 0, some_tokens(256))
    assert context.step([core.row(1, 0, [PROBE])]).status == "ok"


def test_every_decoded_row_is_counted(core: Core, kind: str, unified: bool) -> None:
    context = core.context(kind, kv_unified=unified)
    assert context.n_rows_decoded == 0
    context.step([core.row(0, 0, some_tokens(5)), core.row(1, 0, some_tokens(3))])
    assert context.n_rows_decoded == 8
    context.step([core.row(0, 5, [PROBE], sampler=core.sampler())])
    assert context.n_rows_decoded == 9
    context.memory.clear()
    assert context.n_rows_decoded == 9


def test_an_abort_before_a_step_stops_it_until_cleared(core: Core, kind: str) -> None:
    context = core.context(kind)
    context.abort()
    step = context.step([core.row(0, 0, some_tokens(5), sampler=core.sampler())])
    assert step.status == "aborted"
    assert step.tokens == [None]
    assert context.memory.pos_max(0) is None
    assert context.n_rows_decoded == 0
    context.clear_abort()
    assert context.step([core.row(0, 0, some_tokens(5))]).status == "ok"


def test_an_abort_from_another_thread_leaves_a_memory_that_can_go_on(core: Core, kind: str) -> None:
    tokens = some_tokens(900)
    context = core.context(kind, n_ctx=1024, n_ubatch=64)
    timer = threading.Timer(0.005, context.abort)
    timer.start()
    while context.step([core.row(1, 0, some_tokens(300))]).status == "ok":
        assert context.memory.remove(1, 0, None)
    timer.join()
    context.clear_abort()
    context.memory.remove(1, 0, None)
    core.feed(context, 0, tokens, chunk=300)
    assert np.allclose(core.probe(context, 0), core.fresh(kind, tokens), atol=5e-2)


BAD_CONTEXTS: list[dict[str, Any]] = [
    {"n_ctx": -1}, {"n_batch": 0}, {"n_batch": -1}, {"n_ubatch": 0}, {"n_seq_max": 0}, {"n_seq_max": 257},
    {"n_seq_max": -1}, {"n_batch": 2, "n_seq_max": 4}, {"n_ctx": 2, "n_seq_max": 4}, {"threads": -1},
    {"threads_batch": -1}, {"sample_threads": -1}, {"flash_attn": "maybe"}, {"type_k": "q9"}, {"type_v": "q9"},
    {"type_v": "q8_0", "flash_attn": "off"}, {"pooling": "best"}, {"attention": "none"}, {"rope_scaling": "round"},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_CONTEXTS, ids=str)
def test_contexts_that_cannot_be_made_are_refused(core: Core, options: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        core.context(**options)


def test_a_context_says_how_it_was_made(core: Core, unified: bool) -> None:
    context = core.context(n_ctx=512, n_batch=128, n_ubatch=64, n_seq_max=2, threads=1, kv_unified=unified)
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 128, 64, 2)
    assert context.kv_unified is unified
    assert (context.threads, context.threads_batch) == (1, 1)
    assert context.memory.n_cells == 512
    assert not context.closed
    context.synchronize()


def test_without_a_size_a_context_is_as_long_as_the_model_was_trained(core: Core) -> None:
    assert core.context(n_ctx=0, n_seq_max=1).n_ctx == core.model().n_ctx_train


def test_threads_can_be_changed_and_must_exist(core: Core) -> None:
    context = core.context(threads=2, threads_batch=2)
    context.set_threads(1, 2)
    assert (context.threads, context.threads_batch) == (1, 2)
    for bad in (0, -1):
        with pytest.raises(BadOption):
            context.set_threads(bad, 1)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
def test_every_kv_type_works_for_keys_and_values(core: Core, kv_type: str, unified: bool) -> None:
    context = core.context(type_k=kv_type, type_v=kv_type, kv_unified=unified)
    core.feed(context, 0, some_tokens(40))
    assert np.isfinite(core.probe(context, 0)).all()


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": "off", "type_v": "f16"}, {"flash_attn": "on"}, {"rope_freq_base": 5000.0},
        {"rope_scaling": "linear", "rope_freq_scale": 0.5},
        {"rope_scaling": "yarn", "yarn_ext_factor": 1.0, "yarn_orig_ctx": 512, "rope_freq_scale": 0.5},
        {"offload_kqv": False, "op_offload": False, "poll": 0, "sample_threads": 2},
    ],
    ids=str,
)  # fmt: skip
def test_the_other_options_of_a_context_work(core: Core, options: dict[str, Any]) -> None:
    context = core.context(**options)
    core.feed(context, 0, some_tokens(40))
    assert np.isfinite(core.probe(context, 0)).all()


def test_errors_of_a_context_are_of_the_one_tree_and_say_what_came(core: Core) -> None:
    with pytest.raises(KvasirError, match="513"):
        core.context().step([core.row(0, 0, [PROBE] * 513)])
