"""Who keeps whom alive, and what happens after the end."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvasir.errors import BadOption, Closed, ModelLoadError, ModelNotFound, Unsupported
from tests.contract.core import PROBE, Core

PARTS = ("model", "vocab", "sampler", "context", "memory")


def test_a_context_keeps_its_model_alive(core: Core) -> None:
    context = core.native.Context(core.native.Model.load(core.paths["plain"]), n_ctx=256)
    gc.collect()
    assert context.step([core.row(0, 0, [PROBE], output=True)]).status == "ok"
    assert context.model.n_embd > 0


def test_a_vocabulary_keeps_its_model_alive(core: Core) -> None:
    vocab = core.native.Model.load(core.paths["plain"]).vocab
    gc.collect()
    assert vocab.tokenize("hi", add_special=False) == [104, 105]


def test_an_adapter_keeps_its_model_alive(core: Core) -> None:
    adapter = core.native.Model.load(core.paths["plain"]).load_adapter(core.paths["lora"])
    gc.collect()
    assert adapter.metadata["general.type"] == "adapter"


def test_a_memory_outlives_the_last_name_of_its_context(core: Core) -> None:
    memory = core.context().memory
    gc.collect()
    assert memory.used_cells == 0


def test_any_order_of_garbage_collection_is_safe(core: Core) -> None:
    for order in itertools.permutations(PARTS):
        held = _one_of_each(core)
        for name in order:
            del held[name]
            gc.collect(0)


def _one_of_each(core: Core) -> dict[str, Any]:
    model = core.native.Model.load(core.paths["plain"])
    context = core.native.Context(model, n_ctx=256)
    sampler = core.native.Sampler(model.vocab, core.params())
    context.step([core.row(0, 0, [PROBE], sampler=sampler)])
    return {"model": model, "vocab": model.vocab, "sampler": sampler, "context": context, "memory": context.memory}


def test_closing_twice_is_harmless(core: Core) -> None:
    model = core.native.Model.load(core.paths["plain"])
    adapter = model.load_adapter(core.paths["lora"])
    context = core.native.Context(model, n_ctx=256)
    for thing in (context, adapter, model):
        assert not thing.closed
        thing.close()
        thing.close()
        assert thing.closed


USES_OF_A_CONTEXT: list[Callable[[Any, Core], object]] = [
    lambda context, core: context.step([core.row(0, 0, [PROBE])]),
    lambda context, core: context.logits(0),
    lambda context, core: context.embed([[PROBE]]),
    lambda context, core: context.embed_tokens([PROBE]),
    lambda context, core: context.set_threads(1, 1),
    lambda context, core: context.set_adapters([]),
    lambda context, core: context.synchronize(),
    lambda context, core: core.sampler().sample(context, 0),
]


@pytest.mark.parametrize("use", USES_OF_A_CONTEXT)
def test_a_closed_context_refuses_every_use(core: Core, use: Callable[[Any, Core], object]) -> None:
    context = core.context()
    context.close()
    with pytest.raises(Closed):
        use(context, core)


USES_OF_A_MEMORY: list[Callable[[Any], object]] = [
    lambda memory: memory.remove(0, 0, None),
    lambda memory: memory.share(0, 1, 1),
    lambda memory: memory.copy(0, 1),
    lambda memory: memory.keep(0),
    lambda memory: memory.shift(0, 0, None, 1),
    lambda memory: memory.pos_min(0),
    lambda memory: memory.pos_max(0),
    lambda memory: memory.clear(),
    lambda memory: memory.export_span(0, 0, 1),
    lambda memory: memory.import_span(0, 0, []),
    lambda memory: memory.state(0),
    lambda memory: memory.set_state(0, b""),
    lambda memory: memory.flush(),
]


@pytest.mark.parametrize("use", USES_OF_A_MEMORY)
def test_the_memory_of_a_closed_context_refuses_every_use(core: Core, use: Callable[[Any], object]) -> None:
    context = core.context()
    memory = context.memory
    context.close()
    with pytest.raises(Closed):
        use(memory)


def test_a_closed_model_refuses_every_use(core: Core) -> None:
    model = core.native.Model.load(core.paths["plain"])
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model.vocab,
        lambda: model.metadata,
        lambda: model.chat_template(),
        lambda: model.load_adapter(core.paths["lora"]),
        lambda: core.native.Context(model),
    ]
    for use in uses:
        with pytest.raises(Closed):
            use()


def test_what_was_made_before_outlives_the_closing_of_its_model(core: Core) -> None:
    model = core.native.Model.load(core.paths["plain"])
    vocab, context = model.vocab, core.native.Context(model, n_ctx=256)
    model.close()
    assert vocab.detokenize(vocab.tokenize("still here")) == b"still here"
    assert context.step([core.row(0, 0, [PROBE])]).status == "ok"


def test_an_adapter_in_use_may_be_closed(core: Core) -> None:
    adapter = core.model().load_adapter(core.paths["lora"])
    context = core.context(adapters=[(adapter, 1.0)])
    adapter.close()
    assert context.step([core.row(0, 0, [PROBE])]).status == "ok"
    with pytest.raises(Closed):
        core.context(adapters=[(adapter, 1.0)])


def test_a_model_that_is_not_there_cannot_be_loaded(core: Core) -> None:
    with pytest.raises((ModelLoadError, ModelNotFound)):
        core.native.Model.load("no such thing")


def test_loading_reports_progress_from_nothing_to_all(core: Core) -> None:
    seen: list[float] = []

    def note(done: float) -> bool:
        seen.append(done)
        return True

    core.native.Model.load(core.paths["plain"], progress=note)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_progress_callback_can_stop_the_load(core: Core) -> None:
    with pytest.raises(ModelLoadError):
        core.native.Model.load(core.paths["plain"], progress=lambda done: False)


def test_an_exception_in_a_progress_callback_reaches_the_caller(core: Core) -> None:
    def fail(done: float) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        core.native.Model.load(core.paths["plain"], progress=fail)


@pytest.mark.parametrize("option", [{"split_mode": "diagonal"}, {"devices": ["no such device"]}])
def test_unknown_load_options_are_refused(core: Core, option: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        core.native.Model.load(core.paths["plain"], **option)


def test_a_model_without_weights_has_a_vocabulary_and_no_context(core: Core) -> None:
    model = core.native.Model.load(core.paths["plain"], vocab_only=True)
    assert model.vocab_only
    assert model.vocab.tokenize("hi", add_special=False) == [104, 105]
    with pytest.raises(Unsupported):
        core.native.Context(model)


def test_loading_takes_every_option_that_needs_no_device(core: Core) -> None:
    model = core.native.Model.load(
        core.paths["plain"], gpu_layers=0, split_mode="none", main_gpu=0, tensor_split=[1.0], devices=[],
        use_mmap=False, use_mlock=False, check_tensors=True,
    )  # fmt: skip
    assert core.native.Context(model, n_ctx=256).step([core.row(0, 0, [PROBE])]).status == "ok"
