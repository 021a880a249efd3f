"""Chats that share a short system prompt and nothing else: also what cannot rewind begins at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvasir
from tests.models import write_model

SYSTEM = "You are a guide to a small town and answer in a few words. Never speak of the weather."
ONE = "Where is the mill, and who built it? " * 20
OTHER = "Is there an inn by the river that has rooms for six? " * 14
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def shared(model: kvasir.Model) -> int:
    """Tokens that both prompts begin with."""
    one, other = (model.tokenize(model.render(messages(text))) for text in (ONE, OTHER))
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


@pytest.fixture(params=["mamba", "lfm2"])
def stateful(request: pytest.FixtureRequest) -> Path:
    """A recurrent model, and a hybrid one."""
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


@pytest.mark.parametrize("restarted", [False, True])
def test_a_second_chat_with_the_same_system_prompt(stateful: Path, tmp_path: Path, restarted: bool) -> None:
    options: dict[str, Any] = {"cache_dir": tmp_path, "threads": 1, "context_size": 4096, "slots": 2}
    model = kvasir.load(stateful, **options)
    assert model.chat(messages(ONE), **ASKED).usage.cached_tokens == 0
    if restarted:
        model.close()
        model = kvasir.load(stateful, **options)
    with model:
        n_shared = shared(model)
        reply = model.chat(messages(OTHER), **ASKED)
        plain = model.chat(messages(OTHER), cache=False, **ASKED)
    assert 32 < n_shared < 256
    assert reply.usage.cached_tokens == n_shared
    assert plain.usage.cached_tokens == 0
    assert reply.content == plain.content


def test_a_template_that_writes_no_system_prompt_without_a_question(tmp_path: Path) -> None:
    """There the end of the system prompt is known all the same."""

    def strict(keys: Any) -> None:
        template = keys.kv_data[0]["tokenizer.chat_template"]
        template.value = (
            "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('a question is missing') }}{% endif %}"
            + template.value
        )

    path = write_model("mamba", tmp_path / "strict.gguf", edit=strict)
    with kvasir.load(path, cache_dir=tmp_path, threads=1, context_size=4096, slots=2) as model:
        with pytest.raises(kvasir.errors.BadRequest):
            model.render(messages(ONE)[:1])
        model.chat(messages(ONE), **ASKED)
        assert model.chat(messages(OTHER), **ASKED).usage.cached_tokens == shared(model)
