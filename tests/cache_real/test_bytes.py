"""What a conversation costs on disk: its new tokens, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvasir
from tests.cache_real.rig import Place
from tests.unit.engine.rig import prompt

N_TURNS = 20
# KV of the tiny llama: two layers, one head of 32 each for K and V, two bytes a value.
LLAMA_BYTES = 2 * 2 * 32 * 2


def test_two_long_prompts_that_part_late_share_their_blocks(long_llama: Path, tmp_path: Path) -> None:
    """4,096 tokens each, parting at token 3,000: all before it is reused, and only what follows is written."""
    one = prompt(4096, salt=1)
    other = (*one[:3000], *prompt(1096, salt=2))
    assert other[3000] != one[3000]
    place = Place(tmp_path)
    options: dict[str, Any] = {"cache_dir": tmp_path / "kv", "context_size": 8192, "slots": 2, "threads": 1}
    with kvasir.load(long_llama, **options) as model:
        model.generate(one, temperature=0, max_tokens=2, ignore_eos=True)
    n_first = place.n_bytes
    with kvasir.load(long_llama, **options) as model:
        second = model.generate(other, temperature=0, max_tokens=4, ignore_eos=True)
        plain = model.generate(other, temperature=0, max_tokens=4, ignore_eos=True, cache=False)
    assert second.tokens == plain.tokens
    assert second.usage.cached_tokens >= 3000 // 256 * 256
    assert n_first < 1.05 * 4096 * LLAMA_BYTES
    assert place.n_bytes < 1.36 * n_first


@pytest.mark.parametrize("n_new", [40, 90])
def test_bytes_written_per_turn_follow_the_new_tokens(place: Place, path: Path, kind: str, n_new: int) -> None:
    """Twenty turns, each in a fresh engine. A whole-state cache writes the whole conversation every time.

    A turn writes its full blocks and one tail; the tail before it is written again as part of what it became. So a
    turn may cost its new tokens and two blocks, whatever the length of what went before. States add a constant.
    """
    tokens = prompt(60, salt=3)
    table = ["turn  tokens  new  bytes"]
    new_bytes: list[int] = []
    n_before = 0
    for turn in range(N_TURNS):
        with place.opened(path, context_size=2048, slots=1, block_tokens=64) as each:
            sink = each.ask(tokens, max_tokens=5)
            each.rig.loop.shut()
            assert each.cache.flush(30)
            written = each.cache.stats().bytes_written
        n_now = len(tokens) + 4
        table.append(f"{turn:4}  {n_now:6}  {n_now - n_before:3}  {written:5}")
        new_bytes.append(written)
        assert sink.done.usage.cached_tokens == n_before
        n_before = n_now
        tokens = (*tokens, *sink.tokens, *prompt(n_new - 5, salt=100 + turn))
    early, late = sum(new_bytes[1:8]), sum(new_bytes[-7:])
    assert late <= 1.25 * early, "\n".join(table)
    if kind == "llama":
        most = (n_new + 2 * 64) * LLAMA_BYTES * 1.1 + 3 * 1024
        assert max(new_bytes[1:]) <= most, "\n".join([*table, f"a turn may write {most:.0f}"])
