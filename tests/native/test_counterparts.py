"""Every native function of LlamaCppEx has a counterpart here, which exists and is named by the test that covers it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvasir import native

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z_*]+)` \| (`.+`) \| `(tests/.+\.py)` \|$", GUIDE, re.MULTILINE)
SEED = {
    "model_load", "context_create", "decode", "generate", "generate_tokens", "tokenize", "detokenize", "sampler_*",
    "model_*", "prefill", "embed_decode", "get_embeddings", "batch_eval", "sampler_sample_at", "decode_token",
    "decode_batch",
}  # fmt: skip


def test_the_table_has_every_function() -> None:
    assert {theirs for theirs, _, _ in ROWS} == SEED


@pytest.mark.parametrize(("theirs", "ours", "test"), ROWS, ids=lambda value: value)
def test_a_counterpart_exists_and_its_test_uses_it(theirs: str, ours: str, test: str) -> None:
    text = (ROOT / test).read_text(encoding="utf-8")
    if test.endswith("test_guide.py"):
        text = GUIDE.split("## From LlamaCppEx")[0]
    for name in re.findall(r"`([A-Za-z_.]+)`", ours):
        at: object = native
        for part in name.split("."):
            assert hasattr(at, part), f"{theirs}: native.{name}"
            at = getattr(at, part)
        assert re.search(rf"\b{name.rsplit('.')[-1]}\b", text, re.IGNORECASE), f"{theirs}: {test} never uses {name}"
