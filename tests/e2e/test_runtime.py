"""Several models over one cache, on real llama.cpp."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvasir
from kvasir import errors

STEADY: dict[str, Any] = {"context_size": 1024, "threads": 1, "type_v": "bf16"}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = "The committee met on Monday, on Tuesday and again on Friday, and agreed on nothing. " * 4


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[kvasir.Runtime]:
    with kvasir.Runtime(cache_dir=tmp_path / "kv") as opened:
        yield opened


def rows(runtime: kvasir.Runtime, tier: str) -> int:
    return runtime.cache.stats().tiers[tier].rows


def wait_saved(runtime: kvasir.Runtime) -> None:
    """Wait until the writers have put on disk what is in memory."""
    deadline = time.monotonic() + 20
    while not rows(runtime, "disk") or rows(runtime, "disk") < rows(runtime, "ram"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_models_share_one_cache_and_nothing_else(
    runtime: kvasir.Runtime, tiny_llama: Path, tiny_gemma3: Path
) -> None:
    one = runtime.load(tiny_llama, id="one", **STEADY)
    other = runtime.load(tiny_gemma3, **STEADY)
    assert set(runtime.models) == {"one", "gemma3"}
    assert runtime.models["one"] is runtime.model("one") is one
    assert one._cache is other._cache
    for model in (one, other):
        done = model.generate(PROMPT, max_tokens=4, **GREEDY)
        assert done.usage.cached_tokens == 0
    assert len({row.space for row in runtime.cache.ls() if row.holds == "kv"}) == 2
    assert one.generate(PROMPT, max_tokens=4, **GREEDY).usage.cached_tokens > 0


def test_a_model_loaded_again_finds_what_it_left(runtime: kvasir.Runtime, tiny_llama: Path) -> None:
    first = runtime.load(tiny_llama, id="tiny", **STEADY).generate(PROMPT, max_tokens=8, **GREEDY)
    runtime.unload("tiny")
    assert dict(runtime.models) == {}
    again = runtime.load(tiny_llama, id="tiny", **STEADY).generate(PROMPT, max_tokens=8, **GREEDY)
    assert again.tokens == first.tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    assert runtime.cache.stats().hits == 1  # one cache counted both


def test_a_plain_load_is_private_on_the_same_files(runtime: kvasir.Runtime, tiny_llama: Path, tmp_path: Path) -> None:
    runtime.load(tiny_llama, **STEADY).generate(PROMPT, max_tokens=2, **GREEDY)
    runtime.unload("llama")
    wait_saved(runtime)
    with kvasir.load(tiny_llama, cache_dir=tmp_path / "kv", **STEADY) as alone:
        assert alone.generate(PROMPT, max_tokens=2, **GREEDY).usage.cached_tokens > 0


def test_a_model_is_replaced_while_others_and_itself_are_in_use(
    runtime: kvasir.Runtime, tiny_llama: Path, tiny_gemma3: Path
) -> None:
    other = runtime.load(tiny_gemma3, id="other", **STEADY)
    old = runtime.load(tiny_llama, id="swapped", **STEADY)
    wanted = other.generate("Beside", max_tokens=6, **GREEDY).tokens
    running = old.stream("Still at work", max_tokens=60, **GREEDY)
    stop, made = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            made.append(other.generate("Beside", max_tokens=6, **GREEDY).tokens)

    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(load)
        half = pool.submit(running.result)
        new = runtime.load(tiny_llama, id="swapped", **STEADY)
        assert len(half.result().tokens) == 60  # what ran on the old one came to its end
        time.sleep(0.05)
        stop.set()
        beside.result()
    assert old.closed
    assert runtime.models["swapped"] is new
    assert made
    assert set(made) == {wanted}
    assert len(new.generate("Next", max_tokens=3, **GREEDY).tokens) == 3


def test_without_patience_the_old_models_requests_end_in_an_error(runtime: kvasir.Runtime, tiny_llama: Path) -> None:
    running = runtime.load(tiny_llama, id="a", **STEADY).stream("Long", max_tokens=900, **GREEDY)
    runtime.load(tiny_llama, id="a", drain_s=0, **STEADY)
    with pytest.raises(errors.EngineStopped):
        running.result()


def test_a_load_that_fails_leaves_what_was_there(runtime: kvasir.Runtime, tiny_llama: Path, tmp_path: Path) -> None:
    model = runtime.load(tiny_llama, id="a", **STEADY)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nonsense")
    with pytest.raises(errors.ModelLoadError):
        runtime.load(broken, id="a")
    assert runtime.models["a"] is model
    assert len(model.generate("x", max_tokens=2, **GREEDY).tokens) == 2


def test_an_unknown_id_is_told_with_a_suggestion(runtime: kvasir.Runtime, tiny_llama: Path) -> None:
    with pytest.raises(errors.ModelNotLoaded, match="none is"):
        runtime.unload("tiny")
    runtime.load(tiny_llama, id="tiny", **STEADY)
    with pytest.raises(errors.ModelNotLoaded, match="Did you mean 'tiny'"):
        runtime.model("tinny")
    with pytest.raises(errors.BadOption, match="id must be"):
        runtime.load(tiny_llama, id="")


def test_options_belong_to_the_runtime_or_to_a_model(runtime: kvasir.Runtime, tiny_llama: Path) -> None:
    with pytest.raises(errors.BadOption, match=r"Runtime\.load"):
        kvasir.Runtime(context_size=512)
    with pytest.raises(errors.BadOption, match="cache_dir"):
        kvasir.Runtime(cache_dri="x")
    with pytest.raises(errors.BadOption, match=r"kvasir\.Runtime\(\)"):
        runtime.load(tiny_llama, cache_ram_bytes=5)


def test_each_model_says_what_it_saves_and_where(runtime: kvasir.Runtime, tiny_llama: Path, tiny_gemma3: Path) -> None:
    secret = runtime.load(tiny_llama, id="secret", cache_tiers=["ram"], **STEADY)
    secret.generate(PROMPT, max_tokens=4, **GREEDY)
    assert secret.generate(PROMPT, max_tokens=4, **GREEDY).usage.cached_tokens > 0
    runtime.unload("secret")
    assert rows(runtime, "ram") > 0
    assert rows(runtime, "disk") == 0
    choosy = runtime.load(tiny_gemma3, id="choosy", min_tokens=100_000, cold_min_tokens=100_000, **STEADY)
    choosy.generate(PROMPT, max_tokens=4, **GREEDY)
    runtime.unload("choosy")
    assert rows(runtime, "disk") == 0
    n_before = rows(runtime, "ram")
    runtime.load(tiny_gemma3, id="plain", **STEADY).generate(PROMPT, max_tokens=4, **GREEDY)
    runtime.unload("plain")
    n_plain = rows(runtime, "ram") - n_before
    deadline = time.monotonic() + 20
    while rows(runtime, "disk") < n_plain and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rows(runtime, "disk") == n_plain > 0


def test_closing_closes_all_and_twice_is_harmless(tiny_llama: Path, tmp_path: Path) -> None:
    runtime = kvasir.Runtime(cache_dir=tmp_path)
    model = runtime.load(tiny_llama, **STEADY)
    runtime.close()
    runtime.close()
    assert model.closed
    for call in (lambda: runtime.models, lambda: runtime.load(tiny_llama), lambda: runtime.cache):
        with pytest.raises(errors.Closed):
            call()


def test_a_model_keeps_its_runtime_alive_and_both_go_together(tiny_llama: Path, tmp_path: Path) -> None:
    model = kvasir.Runtime(cache_dir=tmp_path).load(tiny_llama, **STEADY)
    gc.collect()
    assert len(model.generate(PROMPT, max_tokens=2, **GREEDY).tokens) == 2
    end = model._finalizer
    del model
    gc.collect()
    assert not end.alive


def test_a_runtime_in_asyncio(tiny_llama: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with kvasir.Runtime(cache_dir=tmp_path) as runtime:
            model = await runtime.aload(tiny_llama, id="tiny", **STEADY)
            assert len((await model.agenerate("Hello", max_tokens=3, **GREEDY)).tokens) == 3
            await runtime.aunload("tiny", drain_s=1)
            assert not runtime.models

    asyncio.run(run())
