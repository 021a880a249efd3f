"""LoRA adapters: they change the text by as much as their scale says."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import BadOption, KvasirError, ModelLoadError, ModelNotFound
from tests.contract.core import Core, same, some_tokens

TOKENS = some_tokens(20)


@pytest.fixture
def adapter(core: Core) -> Any:
    return core.model().load_adapter(core.paths["lora"])


def test_an_adapter_knows_its_metadata(adapter: Any) -> None:
    assert adapter.metadata["general.type"] == "adapter"
    assert not adapter.closed


def test_an_adapter_changes_the_logits(core: Core, adapter: Any) -> None:
    with_adapter = core.fresh("plain", TOKENS, adapters=[(adapter, 1.0)])
    assert not same(with_adapter, core.fresh("plain", TOKENS))
    assert not same(with_adapter, core.fresh("plain", TOKENS, adapters=[(adapter, 0.5)]))


def test_an_adapter_of_scale_zero_is_none(core: Core, adapter: Any) -> None:
    assert same(core.fresh("plain", TOKENS, adapters=[(adapter, 0.0)]), core.fresh("plain", TOKENS))


def test_adapters_can_be_set_and_taken_away_between_steps(core: Core, adapter: Any) -> None:
    context = core.context()
    context.set_adapters([(adapter, 1.0)])
    core.feed(context, 0, TOKENS)
    assert same(core.probe(context, 0), core.fresh("plain", TOKENS, adapters=[(adapter, 1.0)]))
    context.memory.clear()
    context.set_adapters([])
    core.feed(context, 0, TOKENS)
    assert same(core.probe(context, 0), core.fresh("plain", TOKENS))


def test_an_adapter_of_another_model_is_refused(core: Core) -> None:
    other = core.native.Model.load(core.paths["plain"]).load_adapter(core.paths["lora"])
    with pytest.raises(BadOption):
        core.context(adapters=[(other, 1.0)])
    with pytest.raises(BadOption):
        core.context().set_adapters([(other, 1.0)])


@pytest.mark.parametrize("path", ["no such thing", ""])
def test_an_adapter_that_is_not_there_cannot_be_loaded(core: Core, path: str) -> None:
    with pytest.raises((ModelLoadError, ModelNotFound)):
        core.model().load_adapter(path)


def test_a_model_is_no_adapter_and_an_adapter_no_model(core: Core) -> None:
    with pytest.raises(KvasirError):
        core.model().load_adapter(core.paths["plain"])
    with pytest.raises(KvasirError):
        core.native.Model.load(core.paths["lora"])
