"""Reranking on real llama.cpp: scores are per document, and do not depend on who else is in the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import kvasir
from kvasir import errors


def test_many_documents_score_as_each_alone(tiny_rank: Path) -> None:
    documents = [f"document number {i} " * (1 + i % 3) for i in range(20)]
    with kvasir.load(tiny_rank) as model:
        together = model.rerank("which number?", documents)
        alone = np.array([model.rerank("which number?", [document])[0] for document in documents])
        assert together.shape == (20,)
        assert np.allclose(together, alone, atol=1e-2)
        assert len({round(float(score), 3) for score in together}) > 1
        assert model.rerank("which number?", []).shape == (0,)
        assert np.allclose(asyncio.run(model.arerank("which number?", documents)), together, atol=1e-2)


def test_a_model_without_a_ranking_head_says_so(tiny_bert: Path) -> None:
    with kvasir.load(tiny_bert) as model, pytest.raises(errors.Unsupported, match="reranker"):
        model.rerank("which?", ["this"])
