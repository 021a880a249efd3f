"""The Python API on real llama.cpp: text, seeds, stops, schemas, streams, threads, tasks, exits and bad input."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pydantic
import pytest

import kvasir
from kvasir import errors
from tests.rights import as_somebody_else

PROMPT = "Once upon a time"


def greedy(model: kvasir.Model, prompt: Any = PROMPT, **options: Any) -> kvasir.Completion:
    completion: kvasir.Completion = model.generate(prompt, temperature=0, ignore_eos=True, **options)
    return completion


# Text


@pytest.mark.models
def test_the_continuation_makes_sense(sensible: kvasir.Model, is_default: bool) -> None:
    text = greedy(sensible, "The capital of France is", max_tokens=12).text
    assert text.strip()
    assert not is_default or "Paris" in text


@pytest.mark.parametrize("n", [1, 4, 16])
def test_max_tokens_is_exact(model: kvasir.Model, n: int) -> None:
    completion = greedy(model, max_tokens=n)
    assert len(completion.tokens) == completion.usage.completion_tokens == n
    assert completion.finish_reason == "length"
    assert completion.usage.prompt_tokens == len(model.tokenize(PROMPT))
    timings = completion.timings
    assert min(timings.queue_s, timings.prefill_s, timings.decode_s) >= 0
    assert timings.first_token_s > 0


def test_the_same_seed_gives_the_same_text(model: kvasir.Model) -> None:
    """With nothing reused: llama.cpp rounds otherwise where the last token of a prompt runs alone."""

    def tokens(seed: int | None) -> kvasir.Completion:
        return model.generate(PROMPT, seed=seed, max_tokens=24, cache=False)

    assert tokens(5).tokens == tokens(5).tokens
    drawn = tokens(None)
    assert tokens(drawn.seed).tokens == drawn.tokens
    assert len({tokens(seed).tokens for seed in range(4)}) > 1


def test_greedy_is_the_likeliest_token(model: kvasir.Model) -> None:
    completion = greedy(model, max_tokens=6, logprobs=3)
    assert completion.logprobs is not None
    for entry in completion.logprobs:
        assert entry.token == entry.top[0][0]
        assert entry.logprob == pytest.approx(entry.top[0][2])
        assert [top[2] for top in entry.top] == sorted((top[2] for top in entry.top), reverse=True)
        assert sum(math.exp(top[2]) for top in entry.top) <= 1 + 1e-4


def test_tokens_are_a_prompt_too(model: kvasir.Model) -> None:
    assert greedy(model, model.tokenize(PROMPT), max_tokens=8).tokens == greedy(model, max_tokens=8).tokens
    assert len(greedy(model, [1, 2, 3], max_tokens=1).tokens) == 1


def test_text_is_what_its_tokens_say(model: kvasir.Model) -> None:
    completion = greedy(model, max_tokens=24)
    data = b"".join(model._weights.native.vocab.token_to_bytes(token) for token in completion.tokens)
    assert completion.text == data.decode("utf-8", errors="replace")


def test_a_stop_string_ends_the_text_before_it(model: kvasir.Model) -> None:
    whole = greedy(model, cache=False, max_tokens=40).text
    stop = whole[len(whole) // 2 :][:5]
    shown = ""
    with model.stream(
        PROMPT, cache=False, temperature=0, ignore_eos=True, max_tokens=40, stop=[stop, "\0never"]
    ) as stream:
        for piece in stream:
            shown += piece
            assert whole[: whole.index(stop)].startswith(shown)
        completion = stream.result()
    assert completion.text == shown == whole[: whole.index(stop)]
    assert (completion.stop, completion.finish_reason) == (stop, "stop")


def test_a_forced_emoji_comes_out_whole(model: kvasir.Model) -> None:
    pieces = list(model.stream("A llama: ", grammar='root ::= "🦙🦙 é"', max_tokens=40))
    assert "".join(pieces) == "🦙🦙 é"
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("text", ["héllo wörld", "🦙🇳🇴👩‍👩‍👧", "日本語", "a\0b", "  two  spaces\n\n", "<|im_end|>"])
def test_tokenize_and_detokenize_are_inverse(model: kvasir.Model, text: str) -> None:
    assert model.detokenize(model.tokenize(text, parse_special=False)) == text


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    size: int = pydantic.Field(ge=0, le=999)


def test_a_schema_holds_and_is_parsed(model: kvasir.Model) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"],
        "additionalProperties": False,
    }
    completion = model.generate("An animal as JSON: ", json_schema=schema, max_tokens=200, seed=1)
    assert completion.finish_reason == "stop"
    assert completion.parsed == json.loads(completion.text)
    assert completion.parsed["kind"] in ("cat", "dog")
    assert isinstance(completion.parsed["old"], bool)


def test_a_pydantic_model_gives_an_instance(model: kvasir.Model) -> None:
    completion = model.generate("Oslo as JSON: ", json_schema=City, max_tokens=200, seed=1)
    assert isinstance(completion.parsed, City)
    assert City.model_validate_json(completion.text) == completion.parsed


def test_json_that_is_cut_off_is_not_parsed(model: kvasir.Model) -> None:
    completion = model.generate("Oslo as JSON: ", json_schema=City, max_tokens=2, seed=1)
    assert (completion.finish_reason, completion.parsed) == ("length", None)


def test_options_change_the_text(model: kvasir.Model) -> None:
    token = greedy(model, max_tokens=1).tokens[0]
    assert greedy(model, max_tokens=1, logit_bias={token: -100.0}).tokens[0] != token
    forced = greedy(model, max_tokens=3, logit_bias={token: 100.0})
    assert set(forced.tokens) == {token}
    for options in (
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 0.5},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.5},
        {"repeat_penalty": 1.3, "penalty_last_n": -1},
        {"samplers": ["top_k", "temperature"]},
    ):
        assert len(model.generate(PROMPT, seed=1, max_tokens=8, ignore_eos=True, **options).tokens) == 8
    assert len(model.generate(PROMPT, sampling=kvasir.Sampling.shepherd(), max_tokens=4, ignore_eos=True).tokens) == 4


# Streams, threads, tasks


def test_a_stream_is_lazy_and_the_same_text(model: kvasir.Model) -> None:
    pieces = list(model.stream(PROMPT, cache=False, temperature=0, ignore_eos=True, max_tokens=24))
    assert len(pieces) > 1
    assert "".join(pieces) == greedy(model, cache=False, max_tokens=24).text


def test_leaving_the_loop_frees_the_slot(model: kvasir.Model) -> None:
    for _ in range(12):
        for _ in model.stream(PROMPT, ignore_eos=True, max_tokens=900):
            break
    until = time.monotonic() + 10
    while model._engine.stats().requests_open and time.monotonic() < until:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert model._engine.stats().requests_open == 0  # type: ignore[union-attr]
    assert greedy(model, max_tokens=4).tokens


def test_threads_share_one_model_and_nothing_mixes(model: kvasir.Model) -> None:
    prompts = ["One", "Two and", "Three or four", "Five"] * 2
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: greedy(model, prompt, max_tokens=12), prompts))
    for prompt, completion in zip(prompts, together, strict=True):
        assert len(completion.tokens) == 12
        assert completion.usage.prompt_tokens == len(model.tokenize(prompt))


def test_tasks_share_one_model(model: kvasir.Model) -> None:
    async def read(prompt: str) -> str:
        return "".join([piece async for piece in model.stream(prompt, temperature=0, ignore_eos=True, max_tokens=8)])

    async def run() -> list[str]:
        texts = await asyncio.gather(*(read(f"Number {i}") for i in range(6)))
        completion = await model.agenerate("Number 0", temperature=0, ignore_eos=True, max_tokens=8)
        return [*texts, completion.text]

    texts = asyncio.run(run())
    assert len(texts) == 7
    assert all(texts)


def test_a_cancelled_task_frees_its_slot(model: kvasir.Model) -> None:
    async def run() -> None:
        task = asyncio.create_task(model.agenerate(PROMPT, ignore_eos=True, max_tokens=900))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(greedy(model, max_tokens=2).tokens) == 2


# Embeddings


def test_embeddings_have_the_documented_shapes(model: kvasir.Model) -> None:
    one, two = model.embed("one"), model.embed(["one", "two"])
    assert one.shape == (model.info.n_embd,)
    assert two.shape == (2, model.info.n_embd)
    assert one.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(two, axis=1), 1, rtol=1e-4)
    assert np.abs(model.embed("one", normalize="max")).max() == pytest.approx(1)
    assert float(one @ two[0]) > 0.999
    np.testing.assert_allclose(asyncio.run(model.aembed("one")), one, atol=1e-3)


@pytest.mark.models
def test_near_texts_are_near(sensible: kvasir.Model) -> None:
    cat, kitten, tax = sensible.embed(["The cat sleeps.", "A kitten is asleep.", "Tax law of 1987, section 3"])
    assert cat @ kitten > cat @ tax


def test_an_encoder_embeds_and_refuses_to_generate(tiny_bert: Path) -> None:
    with kvasir.load(tiny_bert) as model:
        assert model.embed(["one", "two", "one"]).shape == (3, model.info.n_embd)
        with pytest.raises(errors.Unsupported):
            model.generate("one")


@pytest.mark.parametrize("kind", ["tiny_gemma3", "tiny_mamba", "tiny_lfm2"])
def test_every_kind_of_memory_generates(kind: str, request: pytest.FixtureRequest) -> None:
    with kvasir.load(request.getfixturevalue(kind), context_size=256) as model:
        assert len(greedy(model, max_tokens=6).tokens) == 6


def test_an_adapter_changes_the_text(tiny_llama: Path, tiny_lora: Path) -> None:
    with kvasir.load(tiny_llama, context_size=256) as plain:
        want = greedy(plain, max_tokens=16, logprobs=0)
    with kvasir.load(tiny_llama, context_size=256, adapters=[(tiny_lora, 4.0)]) as adapted:
        came = greedy(adapted, max_tokens=16, logprobs=0)
    assert want.logprobs is not None
    assert came.logprobs is not None
    assert [entry.logprob for entry in want.logprobs] != [entry.logprob for entry in came.logprobs]


# Processes


def run_script(script: str, path: Path, **more: Any) -> subprocess.Popen[str]:
    code = textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


@pytest.mark.parametrize("tail", ["", "stream = model.stream('a', max_tokens=900, ignore_eos=True); next(stream)"])
def test_a_script_that_closes_nothing_ends_promptly(tiny_llama: Path, tail: str) -> None:
    script = f"""
    import sys, time, kvasir
    model = kvasir.load(sys.argv[1], context_size=1024)
    model.generate("a", max_tokens=2)
    {tail}
    print(time.time(), flush=True)
    """
    process = run_script(script, tiny_llama)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert time.time() - float(out) < 5


def test_a_script_that_raises_ends_promptly(tiny_llama: Path) -> None:
    script = """
    import sys, kvasir
    stream = kvasir.load(sys.argv[1], context_size=1024).stream("a", max_tokens=900, ignore_eos=True)
    for piece in stream:
        raise LookupError("mine")
    """
    process = run_script(script, tiny_llama)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip().endswith("LookupError: mine")


def test_ctrl_c_stops_generation_at_once_and_the_model_goes_on(tiny_llama: Path) -> None:
    script = """
    import sys, time, kvasir
    model = kvasir.load(sys.argv[1], context_size=2048, slots=1)
    print("ready", flush=True)
    try:
        while True:
            model.generate("a", max_tokens=2000, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted", time.time(), flush=True)
    print(len(model.generate("a", max_tokens=3, ignore_eos=True).tokens))
    """
    process = run_script(script, tiny_llama)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    sent = time.time()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    word, when, n = out.split()
    assert (word, n, process.returncode, err) == ("interrupted", "3", 0, "")
    assert float(when) - sent < 2


# Bad input: a typed error in one sentence, and the process lives


def bad_files(folder: Path, good: Path) -> dict[str, Path]:
    data = good.read_bytes()
    draw = random.Random(1)
    contents = {
        "empty.gguf": b"",
        "random.gguf": draw.randbytes(4096),
        "magic.gguf": b"GGUF",
        "version.gguf": b"GGUF" + (99).to_bytes(4, "little") + data[8:],
        "text.gguf": b"hello, I am no model\n" * 100,
    }
    contents |= {f"cut{i}.gguf": data[: len(data) * i // 20] for i in range(20)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.gguf").mkdir()
    return {name: folder / name for name in [*contents, "folder.gguf", "missing.gguf"]}


def test_files_that_are_no_models_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    for name, path in bad_files(tmp_path, tiny_llama).items():
        with pytest.raises((errors.ModelLoadError, errors.ModelNotFound)) as caught:
            kvasir.load(path)
        assert str(caught.value), name
        assert "\n" not in str(caught.value), name


def test_a_file_without_permission_is_refused(tiny_llama: Path) -> None:
    load = kvasir.load  # imported while everything may be read
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the file is what may not be read
        secret = Path(folder) / "secret.gguf"
        secret.write_bytes(tiny_llama.read_bytes())
        secret.chmod(0)
        with as_somebody_else(), pytest.raises(errors.ModelLoadError, match=r"secret\.gguf"):
            load(secret)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("", {}, errors.BadOption),
        ([], {}, errors.BadOption),
        ([10**9], {}, errors.BadOption),
        ([-1], {}, errors.BadOption),
        ("\ud800", {}, errors.TokenizeFailed),
        (b"\xff", {}, errors.TokenizeFailed),
        ("x", {"grammar": "root ::= ("}, errors.BadGrammar),
        ("x", {"grammar": 'nothing ::= "a"'}, errors.BadGrammar),
        ("x", {"json_schema": {"type": "no-such-type"}}, errors.BadSchema),
        ("x", {"json_schema": {"$ref": "#/nowhere"}}, errors.BadSchema),
        ("x", {"max_tokens": -5}, errors.BadOption),
        ("x", {"temprature": 1}, errors.BadOption),
        ("x", {"logit_bias": {10**8: 1.0}}, errors.BadOption),
        ("x " * 5000, {}, errors.PromptTooLong),
    ],
)
def test_bad_requests_are_typed_and_the_model_goes_on(
    model: kvasir.Model, prompt: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        model.generate(prompt, **options)
    assert str(caught.value)
    assert len(greedy(model, max_tokens=2).tokens) == 2


def test_a_prompt_with_nul_bytes_is_text(model: kvasir.Model) -> None:
    assert greedy(model, "a\0b", max_tokens=2).usage.prompt_tokens >= 2


@pytest.mark.parametrize(
    "options",
    [
        {"context_size": -1},
        {"context_size": 2**40},
        {"batch": 0},
        {"batch": 2, "slots": 4},
        {"threads": 100_000},
        {"slots": 0},
        {"gpu_layers": -7},
        {"type_k": "q9"},
        {"n_ctx": 512},
        {"adapters": ["no-such-adapter.gguf"]},
    ],
)
def test_bad_load_options_are_refused(tiny_llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.KvasirError) as caught:
        kvasir.load(tiny_llama, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_loading_fifty_times_gives_the_memory_back(tiny_llama: Path) -> None:
    def use() -> None:
        with kvasir.load(tiny_llama, context_size=256) as model:
            greedy(model, max_tokens=2)
            model.embed("a")

    for _ in range(10):  # allocators and thread stacks settle
        use()
    process = psutil.Process()
    before, threads = process.memory_info().rss, process.num_threads()
    for _ in range(50):
        use()
    assert process.memory_info().rss - before < 20 << 20
    assert process.num_threads() <= threads


def test_loading_can_be_given_up(tiny_llama: Path) -> None:
    with pytest.raises(errors.ModelLoadError):
        kvasir.load(tiny_llama, progress=lambda part: False)


def test_a_model_closed_while_used_ends_its_streams(tiny_llama: Path) -> None:
    model = kvasir.load(tiny_llama, context_size=2048)
    streams = [model.stream("a", max_tokens=2000, ignore_eos=True) for _ in range(3)]
    next(streams[0])
    threading.Thread(target=model.close).start()
    for stream in streams:
        try:
            stream.result()
        except errors.EngineStopped:
            continue
    model.close()
    with pytest.raises(errors.Closed):
        model.generate("a")
