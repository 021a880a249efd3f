"""Interrupted requests and resent conversations on real llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvasir
from kvasir import native

PROMPT = "A long enough beginning that waiting for it is worth the while of everybody who begins the same."


@pytest.fixture
def steady(any_path: Path) -> Any:
    """Opens the model so that no figure depends on where its cells lie or on how many rows a tick has."""
    return lambda **options: kvasir.load(any_path, context_size=1024, threads=1, type_v="bf16", **options)


@pytest.mark.parametrize("options", [{}, {"repeat_penalty": 1.2}, {"xtc_probability": 0.5}, {"samplers": ["min_p"]}])
def test_a_turn_interrupted_and_resumed_makes_the_tokens_it_would_have_made(
    steady: Any, options: dict[str, Any]
) -> None:
    with steady() as model:
        whole = model.generate(PROMPT, seed=11, max_tokens=40, ignore_eos=True, **options)
        begun = model.generate(PROMPT, seed=11, max_tokens=15, ignore_eos=True, **options)
    so_far = [*begun.tokens]
    with steady() as again:
        tokens = [*again.tokenize(PROMPT), *so_far]
        rest = again.generate(tokens, seed=11, max_tokens=25, ignore_eos=True, resumed_tokens=len(so_far), **options)
    assert begun.tokens + rest.tokens == whole.tokens
    assert rest.usage.cached_tokens > 0
    assert rest.fresh_samplers == ()


def test_a_resumed_request_names_the_samplers_that_begin_anew(steady: Any) -> None:
    with steady() as model:
        done = model.generate(model.tokenize(PROMPT), max_tokens=2, mirostat=2, resumed_tokens=2)
        assert done.fresh_samplers == ("mirostat_v2",)


def test_a_resent_conversation_hits_to_the_end_of_the_models_own_reply(steady: Any) -> None:
    """Random weights spell "the" now in one token and now in three: hardly ever as the tokenizer would."""
    with steady() as model:
        n_prompt = len(model.tokenize(PROMPT))
        for seed in range(20):
            reply = model.generate(
                PROMPT, seed=seed, max_tokens=40, grammar='root ::= (" the" | " he")+', temperature=2.0
            )
            if model.tokenize(PROMPT + reply.text) != [*model.tokenize(PROMPT), *reply.tokens]:
                break
        else:
            pytest.fail("no reply was split otherwise than the tokenizer splits it")
        second = model.generate(PROMPT + reply.text + " Go on, please.", max_tokens=2)
        assert second.usage.cached_tokens >= n_prompt + len(reply.tokens) - 1


@pytest.mark.parametrize("fact", ["llama_cpp", "kernels", "backend"])
def test_rows_that_another_build_computed_are_not_used(
    steady: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    def n_cached() -> int:
        with steady(cache_dir=tmp_path) as model:
            n: int = model.generate(3 * PROMPT, max_tokens=2).usage.cached_tokens
            return n

    assert (n_cached(), n_cached() > 0) == (0, True)
    build = native.build_info()
    monkeypatch.setattr(native, "build_info", lambda: {**build, fact: "another"})
    assert n_cached() == 0
