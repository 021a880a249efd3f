"""Calls that would trip an assertion inside llama.cpp: each runs in a child, which must live to say it was refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from kvasir import errors, native
model = native.Model.load(sys.argv[1])
try:
    {call}
except errors.BadOption:
    print("refused")
"""
CALLS = {
    "an encoder is asked to generate": (
        "native.Context(model, n_ctx=256).step([native.Row(0, 0, [2, 5, 3], output=True)])"
    ),
    "an encoder gets half a batch": (
        "native.Context(model, n_ctx=512, n_ubatch=8, embeddings=True).embed([[2] + [5] * 20 + [3]])"
    ),
    "a text is longer than the positions of an encoder": (
        "native.Context(model, n_ctx=1024, n_batch=1024, n_ubatch=1024, embeddings=True).embed([[5] * 600])"
    ),
    "a generating context is made for rank": (
        "native.Context(model, n_ctx=256, pooling='rank').step([native.Row(0, 0, [2, 5, 3], output=True)])"
    ),
}


@pytest.mark.parametrize("why", CALLS)
def test_a_call_that_would_trip_an_assertion_is_refused(tiny_bert: Path, why: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(call=CALLS[why]), str(tiny_bert)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stdout) == (0, "refused\n"), child.stderr[-1000:]
