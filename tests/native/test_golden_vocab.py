"""llama.cpp's golden vocabularies: 15 tokenizers, each with texts and the tokens they must become."""

from __future__ import annotations

from pathlib import Path

import pytest

import llama_cpp
from kvasir import native

NAMES = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe",
    "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the pinned source that holds the vocabularies."""
    return Path(llama_cpp.current_source().folder) / "models"


def test_no_golden_vocabulary_is_left_out(golden: Path) -> None:
    there = sorted(path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for path in golden.glob("*.inp"))
    assert there == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_text_becomes_the_golden_tokens(golden: Path, name: str) -> None:
    path = golden / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    answers = [[int(token) for token in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert len(texts) == len(answers) > 0
    vocab = native.Model.load(str(path), vocab_only=True).vocab
    for text, answer in zip(texts, answers, strict=True):
        assert vocab.tokenize(text, add_special=False) == answer, repr(text)
