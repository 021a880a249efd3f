"""Without flash attention V lies transposed: its cells are no rows, and moving them as rows would be silently wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvasir import native
from kvasir.errors import Unsupported

TOKENS = [97 + (7 * i * i + 3 * i) % 26 for i in range(48)]


def read(path: Path, *, unified: bool) -> native.Context:
    context = native.Context(
        native.Model.load(str(path)), n_ctx=512, n_seq_max=2, threads=1, kv_unified=unified, flash_attn="off"
    )
    assert context.step([native.Row(0, 0, TOKENS)]).status == "ok"
    return context


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_transposed_values_are_not_exported(tiny_llama: Path, unified: bool) -> None:
    memory = read(tiny_llama, unified=unified).memory
    with pytest.raises(Unsupported, match="transposed"):
        memory.export_span(0, 0, 32)
    with pytest.raises(Unsupported, match="transposed"):
        memory.import_span(1, 0, [])


def test_a_split_memory_does_not_share_transposed_values(tiny_llama: Path) -> None:
    memory = read(tiny_llama, unified=False).memory
    assert not memory.share(0, 1, 32)
    assert memory.pos_max(1) is None


def test_a_unified_memory_shares_them_for_no_row_moves(tiny_llama: Path) -> None:
    context = read(tiny_llama, unified=True)
    assert context.memory.share(0, 1, len(TOKENS))
    logits = []
    for seq in (0, 1):
        assert context.step([native.Row(seq, len(TOKENS), [120], output=True)]).status == "ok"
        logits.append(context.logits(0))
    assert np.allclose(logits[0], logits[1], atol=1e-3)
