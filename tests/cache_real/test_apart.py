"""What may never meet does not: models, adapters and scales, scopes, KV types. What should meet does, anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvasir
from tests.cache_real.rig import EXACT, Place, alone
from tests.engine_real.noise import check_bits
from tests.unit.engine.rig import prompt

ROOT = Path(__file__).parents[2]
LONG = prompt(150, salt=2)


def cached(place: Place, path: Path, **options: Any) -> int:
    """Run the prompt in a fresh engine, compare it with a run without cache, and tell what came from disk."""
    scope = options.pop("scope", None)
    with place.opened(path, **(EXACT | options)) as each:
        sink = each.ask(LONG, scope=scope)
    check_bits(sink, alone(path, LONG, **(EXACT | options)))
    return sink.done.usage.cached_tokens


def test_two_models_with_equal_prompts(place: Place, tiny_llama: Path, other_llama: Path) -> None:
    assert cached(place, tiny_llama) == 0
    assert cached(place, other_llama) == 0
    assert cached(place, tiny_llama) == cached(place, other_llama) == len(LONG)


def test_the_same_weights_under_another_name(place: Place, tiny_llama: Path, tmp_path: Path) -> None:
    assert cached(place, tiny_llama) == 0
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_llama.read_bytes())
    assert cached(place, copy) == len(LONG)


def test_a_model_overwritten_in_place(place: Place, tiny_llama: Path, other_llama: Path, tmp_path: Path) -> None:
    """The remembered hash of a file is not that of the file now."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    assert cached(place, path) == 0
    path.write_bytes(other_llama.read_bytes())
    assert cached(place, path) == 0


def test_adapters_and_their_scales(place: Place, tiny_llama: Path, tiny_lora: Path) -> None:
    choices: list[dict[str, Any]] = [{}, *({"adapters": [(tiny_lora, scale)]} for scale in (1.0, 0.5))]
    for options in choices:
        assert cached(place, tiny_llama, **options) == 0, options
    for options in choices:
        assert cached(place, tiny_llama, **options) == len(LONG), options


def test_scopes(place: Place, tiny_llama: Path) -> None:
    for scope in (None, "a", "b"):
        assert cached(place, tiny_llama, scope=scope) == 0, scope
    for scope in (None, "a", "b"):
        assert cached(place, tiny_llama, scope=scope) == len(LONG), scope


def test_types_of_kv(place: Place, tiny_llama: Path) -> None:
    types = [("f16", "f16"), ("f16", "bf16"), ("bf16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")]
    for k, v in types:
        assert cached(place, tiny_llama, type_k=k, type_v=v) == 0, (k, v)
    for k, v in types:
        assert cached(place, tiny_llama, type_k=k, type_v=v) >= len(LONG) - 1, (k, v)


def test_rope(place: Place, tiny_llama: Path) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"rope_freq_base": 50_000.0},
        {"rope_scaling": "linear", "rope_freq_scale": 0.5},
    ]
    for options in choices:
        assert cached(place, tiny_llama, **options) == 0, options
    assert cached(place, tiny_llama) == len(LONG)


@pytest.mark.parametrize("full", [True, False])
def test_a_window_kept_whole_or_not(place: Place, tiny_gemma3: Path, full: bool) -> None:
    assert cached(place, tiny_gemma3, swa_full=full) == 0
    assert cached(place, tiny_gemma3, swa_full=full) >= 128


# Unload, reload, another process: as users have it

CHILD = """
import json, sys
import kvasir
with kvasir.load(sys.argv[1], cache_dir=sys.argv[2], threads=1, context_size=1024) as model:
    done = model.generate(json.loads(sys.argv[3]), temperature=0, max_tokens=12, ignore_eos=True)
print(json.dumps([list(done.tokens), done.usage.cached_tokens, done.key]))
"""


def in_another_process(path: Path, folder: Path, tokens: tuple[int, ...]) -> tuple[list[int], int, str]:
    command = [sys.executable, "-c", CHILD, str(path), str(folder), json.dumps(tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    made, n_cached, key = json.loads(done.stdout)
    return made, n_cached, key


def test_another_process_with_default_settings(tmp_path: Path, path: Path) -> None:
    """Blocks of 256, and everything else as a user gets it; each process leaves what the next one finds."""
    tokens = prompt(600, salt=4)
    made, first, key = in_another_process(path, tmp_path, tokens)
    turn = (*tokens, *made, *prompt(30, salt=5))
    said, second, _ = in_another_process(path, tmp_path, turn)
    assert (first, second) == (0, len(tokens) + len(made) - 1)
    with kvasir.load(path, cache_dir=tmp_path, threads=1, context_size=1024) as model:
        again = model.generate(turn, temperature=0, max_tokens=12, ignore_eos=True, parent_key=key)
        plain = model.generate(turn, temperature=0, max_tokens=12, ignore_eos=True, cache=False)
    assert again.usage.cached_tokens >= len(tokens) + len(made) - 1
    assert plain.usage.cached_tokens == 0
    assert said == list(again.tokens) == list(plain.tokens)


def test_unload_and_reload(tmp_path: Path, path: Path) -> None:
    tokens = prompt(600, salt=4)
    answers = []
    for layout in ("unified", "split", "unified"):
        with kvasir.load(path, cache_dir=tmp_path, threads=1, layout=layout, context_size=2048, slots=2) as model:
            answers.append(model.generate(tokens, temperature=0, max_tokens=12, ignore_eos=True))
    first, *later = answers
    assert first.usage.cached_tokens == 0
    assert all(each.tokens == first.tokens for each in later)
    assert all(each.usage.cached_tokens >= 512 for each in later)
