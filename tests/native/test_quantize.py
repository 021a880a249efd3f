"""llama.cpp's quantizer: what it writes loads and generates, it reports and stops, and it refuses in words."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvasir import errors, native
from kvasir.model.layouts import LAYOUT_BITS, layout_of

# Rows of the tiny model are 64 wide; K layouts need 256, so llama.cpp falls back to others there.
PLAIN = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def generate(path: Path, n: int = 8) -> list[int]:
    model = native.Model.load(str(path))
    context = native.Context(model, n_ctx=256, threads=1)
    params = native.SamplerParams()
    params.temperature = 0.0
    sampler = native.Sampler(model.vocab, params)
    tokens, pos, made = model.vocab.tokenize("Once upon"), 0, []
    for _ in range(n):
        step = context.step([native.Row(0, pos, tokens, sampler=sampler)])
        assert step.status == "ok"
        pos += len(tokens)
        token = step.tokens[0]
        assert token is not None
        tokens = [token]
        made.append(token)
    return made


@pytest.mark.parametrize("to", PLAIN)
def test_what_it_writes_has_the_layout_and_generates(tiny_llama: Path, tmp_path: Path, to: str) -> None:
    target = tmp_path / "out.gguf"
    native.quantize(str(tiny_llama), str(target), to=to, threads=1)
    assert layout_of(native.check_gguf(str(target)).file_type) == to
    assert len(generate(target)) == 8


@pytest.mark.parametrize("to", LAYOUT_BITS)
def test_every_layout_we_name_is_one(tiny_llama: Path, tmp_path: Path, to: str) -> None:
    native.quantize(str(tiny_llama), str(tmp_path / "out.gguf"), to=to)
    assert layout_of(native.check_gguf(str(tmp_path / "out.gguf")).file_type) == to


def test_f16_keeps_what_is_generated(tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    native.quantize(str(tiny_llama), str(target), to="f16")
    assert generate(target) == generate(tiny_llama)


def test_quantised_weights_are_quantised_again(tiny_llama: Path, tmp_path: Path) -> None:
    native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), to="q4_1")
    native.quantize(str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), to="q8_0")
    assert native.Model.load(str(tmp_path / "b.gguf")).file_type == "Q8_0"


def test_progress_rises_from_0_to_1(tiny_llama: Path, tmp_path: Path) -> None:
    parts: list[float] = []

    def hear(part: float) -> bool:
        parts.append(part)
        return True

    native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), to="q8_0", progress=hear)
    assert parts[0] == 0.0
    assert parts[-1] == 1.0
    assert parts == sorted(parts)
    assert len(parts) == native.check_gguf(str(tiny_llama)).n_tensors + 1


def test_returning_false_stops_and_the_next_one_works(tiny_llama: Path, tmp_path: Path) -> None:
    seen: list[float] = []

    def until_half(part: float) -> bool:
        seen.append(part)
        return part < 0.5

    with pytest.raises(errors.ModelLoadError, match="stopped by its progress callback"):
        native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), to="q8_0", progress=until_half)
    assert 0.5 <= seen[-1] < 1.0
    native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), to="q8_0")
    assert generate(tmp_path / "a.gguf")


def test_an_exception_in_progress_comes_out_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    def interrupted(_part: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), to="q8_0", progress=interrupted)


def test_two_threads_convert_at_once_and_hear_of_their_own_only(tiny_llama: Path, tmp_path: Path) -> None:
    heard: dict[int, list[float]] = {0: [], 1: []}

    def convert(number: int) -> None:
        def hear(part: float) -> bool:
            heard[number].append(part)
            return True

        native.quantize(str(tiny_llama), str(tmp_path / f"{number}.gguf"), to="q4_0", threads=1, progress=hear)

    threads = [threading.Thread(target=convert, args=(number,)) for number in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1] == sorted(heard[0])


@pytest.mark.parametrize("options", [{"to": "q9_0"}, {"to": ""}, {"to": "q8_0", "threads": -1}])
def test_options_that_mean_nothing_are_refused(tiny_llama: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(errors.BadOption):
        native.quantize(str(tiny_llama), str(tmp_path / "a.gguf"), **options)
    assert not (tmp_path / "a.gguf").exists()


def test_a_model_is_not_written_over_itself(tiny_llama: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_llama)
    before = tiny_llama.read_bytes()
    with pytest.raises(errors.BadOption, match="is the model itself"):
        native.quantize(str(tiny_llama), str(link), to="q8_0")
    assert tiny_llama.read_bytes() == before


def test_files_that_cannot_be_read_or_written_are_told(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ModelNotFound):
        native.quantize(str(tmp_path / "gone.gguf"), str(tmp_path / "a.gguf"), to="q8_0")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(errors.ModelLoadError):
        native.quantize(str(tmp_path / "bad.gguf"), str(tmp_path / "a.gguf"), to="q8_0")
    with pytest.raises(errors.ModelLoadError, match="could not be written"):
        native.quantize(str(tiny_llama), str(tmp_path / "no" / "a.gguf"), to="q8_0")


@pytest.mark.parametrize("kind", ["tiny_gemma3", "tiny_mamba", "tiny_lfm2", "tiny_bert", "tiny_rank"])
def test_other_architectures_convert_too(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    source: Path = request.getfixturevalue(kind)
    native.quantize(str(source), str(tmp_path / "a.gguf"), to="q8_0")
    assert native.Model.load(str(tmp_path / "a.gguf")).file_type == "Q8_0"
