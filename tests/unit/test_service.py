"""The model as users hold it, on the fake core: options, threads, closing, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvasir
from kvasir import errors
from kvasir.config import load_settings
from kvasir.native import fake
from kvasir.native.fake_model import logs
from kvasir.service.model import Model
from kvasir.types import FinishReason, Sampling

LONG = "Once upon a time there was a king who had three daughters and no crown at all."


def open_fake(kind: str = "plain", facts: str = "", **options: Any) -> Model:
    settings = load_settings(options, environ={})
    return Model.open(Path(f"fake:{kind}{'?' + facts if facts else ''}"), settings, core=fake)


@pytest.fixture
def model() -> Iterator[Model]:
    with open_fake(context_size=512) as opened:
        yield opened


def greedy(model: Model, prompt: Any = "abc", **options: Any) -> kvasir.Completion:
    completion: kvasir.Completion = model.generate(prompt, temperature=0, ignore_eos=True, **options)
    return completion


@pytest.mark.parametrize("n", [1, 4, 16])
def test_max_tokens_is_exact(model: Model, n: int) -> None:
    completion = greedy(model, max_tokens=n)
    assert len(completion.tokens) == n
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.completion_tokens == n
    assert completion.usage.prompt_tokens == 3


def test_stream_and_generate_agree(model: Model) -> None:
    assert (
        "".join(model.stream("abc", temperature=0, max_tokens=20, ignore_eos=True)) == greedy(model, max_tokens=20).text
    )


def test_text_and_its_tokens_are_the_same_prompt(model: Model) -> None:
    assert greedy(model, "hello", max_tokens=8).tokens == greedy(model, model.tokenize("hello"), max_tokens=8).tokens


def test_the_same_seed_gives_the_same_text_and_is_reported(model: Model) -> None:
    first = model.generate("abc", seed=11, max_tokens=24)
    assert first.seed == 11
    assert model.generate("abc", seed=11, max_tokens=24).tokens == first.tokens
    drawn = model.generate("abc", max_tokens=24)
    assert 0 <= drawn.seed < 2**32
    assert model.generate("abc", seed=drawn.seed, max_tokens=24).tokens == drawn.tokens


def test_n_completions_are_n_requests_with_a_seed_each_and_read_the_prompt_once(model: Model) -> None:
    several = model.generate(LONG, n=4, seed=7, max_tokens=12)
    assert [each.seed for each in several] == [7, 8, 9, 10]
    alone = [model.generate(LONG, seed=seed, max_tokens=12, cache=False) for seed in range(7, 11)]
    assert [each.tokens for each in several] == [each.tokens for each in alone]
    assert all(each.usage.cached_tokens == each.usage.prompt_tokens - 1 for each in several[1:])


def test_reuse_stays_within_a_scope(model: Model) -> None:
    prompt = "The same long beginning of every prompt of this test, said once more."
    first = model.generate(prompt, max_tokens=2, scope="a")
    other = model.generate(prompt, max_tokens=2, scope="b")
    again = model.generate(prompt, max_tokens=2, scope="a")
    assert first.usage.cached_tokens == other.usage.cached_tokens == 0
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert model.stats().counters.shared_parked == 1


def test_an_interrupted_request_goes_on_with_the_tokens_it_would_have_made(model: Model) -> None:
    whole = model.generate(LONG, seed=3, max_tokens=20, ignore_eos=True, repeat_penalty=1.1)
    begun = model.generate(LONG, seed=3, max_tokens=8, ignore_eos=True, repeat_penalty=1.1)
    so_far = [*model.tokenize(LONG), *begun.tokens]
    rest = model.generate(
        so_far, seed=3, max_tokens=12, ignore_eos=True, repeat_penalty=1.1, resumed_tokens=len(begun.tokens)
    )
    assert begun.tokens + rest.tokens == whole.tokens
    assert rest.usage.cached_tokens >= rest.usage.prompt_tokens - 1
    assert rest.fresh_samplers == ()


def test_only_generated_tokens_can_be_resumed(model: Model) -> None:
    with pytest.raises(errors.BadOption, match="resumed_tokens must be 0 to 3"):
        model.generate([65, 66, 67, 68], resumed_tokens=4)


def test_a_conversation_resent_as_text_hits_to_the_end_of_the_models_own_reply(model: Model) -> None:
    spelled = {256: -100.0, 257: -100.0, 258: -100.0, ord("h"): 8.0, ord("e"): 8.0}  # "he" as two tokens, never as one
    first = model.generate(LONG, seed=5, max_tokens=30, ignore_eos=True, logit_bias=spelled)
    resent = LONG + first.text
    assert model.tokenize(resent) != [*model.tokenize(LONG), *first.tokens]  # the tokenizer splits it otherwise
    second = model.generate(resent + " And then the thing went on.", max_tokens=2)
    assert second.usage.cached_tokens == len(model.tokenize(LONG)) + 29  # the last token of a reply never ran


def test_a_deadline_that_passes_is_told(model: Model) -> None:
    with pytest.raises(errors.DeadlineExceeded, match="deadline"):
        model.generate("endless", max_tokens=400, ignore_eos=True, deadline=1e-9)


def test_one_sampling_value_can_carry_the_options_and_keywords_win(model: Model) -> None:
    sampling = Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    assert len(model.generate("abc", sampling=sampling).tokens) == 5
    assert len(model.generate("abc", sampling=sampling, max_tokens=3).tokens) == 3


def test_environment_and_toml_give_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kvasir.toml").write_text("[sampling]\nmax_tokens = 7\nignore_eos = true\n")
    with open_fake() as model:
        assert len(model.generate("abc").tokens) == 7
    monkeypatch.setenv("KVASIR_MAX_TOKENS", "5")
    with open_fake() as model:
        assert len(model.generate("abc").tokens) == 5
        assert len(model.generate("abc", max_tokens=3).tokens) == 3


def test_a_stop_string_ends_the_text_before_it(model: Model) -> None:
    whole = greedy(model, max_tokens=40)
    stop = whole.text[5:8]
    cut = greedy(model, max_tokens=40, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.stop, cut.finish_reason) == (stop, FinishReason.STOP)


def test_logprobs_are_given_where_asked(model: Model) -> None:
    completion = greedy(model, max_tokens=4, logprobs=3)
    assert completion.logprobs is not None
    assert [entry.token for entry in completion.logprobs] == list(completion.tokens)
    assert all(entry.logprob <= 0 and len(entry.top) == 3 for entry in completion.logprobs)
    assert greedy(model, max_tokens=4).logprobs is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temprature": 1}, "temperature"),
        ({"max_token": 1}, "max_tokens"),
        ({"context_size": 1}, "load option"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n must"),
        ({"priority": 1.5}, "priority"),
        ({"deadline": -1}, "deadline"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"samplers": ["top_x"]}, "top_k|top_p"),
    ],
)
def test_bad_options_are_named(model: Model, options: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.BadOption, match=match):
        model.generate("abc", **options)


@pytest.mark.parametrize(
    ("options", "match"), [({"n_ctx": 5}, "context_size"), ({"temperature": 1}, "sampling option")]
)
def test_bad_load_options_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.BadOption, match=match):
        kvasir.load("fake:plain", **options)


def test_a_broken_grammar_and_a_broken_schema_are_named(model: Model) -> None:
    with pytest.raises(errors.BadGrammar):
        model.generate("abc", grammar="root ::= (")
    with pytest.raises(errors.BadSchema):
        model.generate("abc", json_schema={"type": object()})


def test_a_prompt_longer_than_the_context_says_both_numbers(model: Model) -> None:
    with pytest.raises(errors.PromptTooLong) as caught:
        model.generate("x" * 600)
    assert (caught.value.n_tokens, caught.value.limit) == (600, 512) or "512" in str(caught.value)
    assert greedy(model, max_tokens=2).text is not None


def test_leaving_the_loop_stops_the_work_and_the_model_goes_on(model: Model) -> None:
    for _ in model.stream("abc", max_tokens=400, temperature=0, ignore_eos=True):
        break
    assert _idle(model)
    assert len(greedy(model, max_tokens=3).tokens) == 3


def test_a_dropped_stream_frees_its_slot(model: Model) -> None:
    for _ in range(20):
        model.stream("abc", max_tokens=400, temperature=0, ignore_eos=True)
    gc.collect()
    assert _idle(model)


def _idle(model: Model, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        assert model._engine is not None
        if model._engine.stats().requests_open == 0:
            return True
        time.sleep(0.005)
    return False


def test_many_threads_use_one_model_and_nothing_mixes(model: Model) -> None:
    prompts = [f"prompt {i}" for i in range(16)]
    alone = [greedy(model, prompt, max_tokens=12).tokens for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: greedy(model, prompt, max_tokens=12).tokens, prompts))
    assert together == alone


def test_many_tasks_use_one_model(model: Model) -> None:
    async def run() -> list[kvasir.Completion]:
        calls = (model.agenerate(f"p{i}", temperature=0, max_tokens=6, ignore_eos=True) for i in range(12))
        return await asyncio.gather(*calls)

    assert [c.tokens for c in asyncio.run(run())] == [greedy(model, f"p{i}", max_tokens=6).tokens for i in range(12)]


def test_use_after_close_raises_and_closing_twice_is_harmless(model: Model) -> None:
    model.close()
    model.close()
    assert model.closed
    for use in (lambda: model.generate("a"), lambda: model.embed("a"), lambda: model.tokenize("a")):
        with pytest.raises(errors.Closed):
            use()
    with pytest.raises(errors.Closed):
        model.detokenize([1])
    assert model.info.description


def test_closing_ends_open_streams(model: Model) -> None:
    stream = model.stream("abc", max_tokens=400, temperature=0, ignore_eos=True)
    closing = threading.Thread(target=model.close)
    closing.start()
    with contextlib.suppress(errors.EngineStopped):  # or it ended just before
        stream.result()
    closing.join()
    with pytest.raises(errors.Closed):
        model.stream("abc")


def test_a_dropped_model_closes_what_it_owns() -> None:
    model = open_fake()
    native_model = weakref.ref(model._weights)
    engine = model._engine
    del model
    gc.collect()
    assert native_model() is None or native_model().native.closed  # type: ignore[union-attr]
    assert engine is not None
    with pytest.raises(errors.Stopped):
        engine.call(lambda: None)


def test_a_stream_keeps_its_model() -> None:
    text = open_fake().stream("abc", temperature=0, max_tokens=5, ignore_eos=True).result()
    assert len(text.tokens) == 5


def test_embeddings_have_the_documented_shapes_and_lengths(model: Model) -> None:
    n = model.info.n_embd
    one, two = model.embed("one"), model.embed(["one", "two"])
    assert one.shape == (n,)
    assert two.shape == (2, n)
    assert one.dtype == two.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(two, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(one, two[0], rtol=1e-5)
    np.testing.assert_allclose(np.abs(model.embed("one", normalize="max")).max(), 1, rtol=1e-6)
    assert model.embed([]).shape == (0, n)
    with pytest.raises(errors.BadOption, match="normalize"):
        model.embed("one", normalize="l3")  # type: ignore[arg-type]


def test_many_texts_embed_as_each_alone(model: Model) -> None:
    texts = [f"text number {i} " * (i % 7 + 1) for i in range(70)]
    together = model.embed(texts)
    np.testing.assert_allclose(together, np.stack([model.embed(text) for text in texts]), rtol=1e-5)


def test_a_text_too_long_to_embed_says_both_numbers(model: Model) -> None:
    with pytest.raises(errors.PromptTooLong, match=r"2,500 tokens.*2,048"):
        model.embed("x" * 2500)


def test_embedding_in_asyncio(model: Model) -> None:
    np.testing.assert_array_equal(asyncio.run(model.aembed("one")), model.embed("one"))


def test_an_encoder_embeds_and_says_that_it_cannot_generate() -> None:
    with open_fake("embed") as model:
        assert model.embed("one").shape == (model.info.n_embd,)
        assert (model.info.has_encoder, model.info.has_decoder) == (True, False)
        with pytest.raises(errors.Unsupported, match="encoder") as caught:
            model.generate("one")
    assert caught.value.what == "generate text"
    assert caught.value.why


def test_a_reranker_says_that_it_cannot_embed() -> None:
    with open_fake("rank") as model, pytest.raises(errors.Unsupported, match="reranker"):
        model.embed("one")


def test_a_vocabulary_alone_tokenizes_and_refuses_the_rest() -> None:
    with open_fake(vocab_only=True) as model:
        assert model.detokenize(model.tokenize("héllo")) == "héllo"
        with pytest.raises(errors.Unsupported, match="vocab_only"):
            model.generate("a")
        with pytest.raises(errors.Unsupported, match="vocab_only"):
            model.embed("a")


@pytest.mark.parametrize("kind", ["plain", "window", "recurrent", "hybrid"])
def test_every_kind_of_memory_generates(kind: str) -> None:
    with open_fake(kind) as model:
        assert model.info.memory_kind == kind
        assert len(greedy(model, max_tokens=4).tokens) == 4


def test_info_is_frozen_and_complete(model: Model) -> None:
    info = model.info
    assert info.n_vocab == 262
    assert info.n_ctx_train == 2048
    assert info.chat_template is not None
    assert info.path == Path("fake:plain")
    with pytest.raises(AttributeError):
        info.n_vocab = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        info.metadata["a"] = "b"  # type: ignore[index]


def test_round_trip_with_a_beginning_token() -> None:
    with open_fake(facts="add_bos=1") as model:
        tokens = model.tokenize("héllo 🦙")
        assert model.detokenize(tokens) == "héllo 🦙"
        assert model.detokenize(tokens, special=True).endswith("héllo 🦙")
        assert model.tokenize("a", add_special=False) == [ord("a")]


def test_special_tokens_are_read_in_prompts_unless_turned_off(model: Model) -> None:
    assert len(model.tokenize("<|im_end|>")) == 1
    assert len(model.tokenize("<|im_end|>", parse_special=False)) == len("<|im_end|>")


def test_llama_cpp_logs_reach_python_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kvasir.llama"), open_fake():
        logs.put((20, "a line of llama.cpp"))
        until = time.monotonic() + 5
        while "a line of llama.cpp" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "a line of llama.cpp" in caplog.text
