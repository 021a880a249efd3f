"""A deterministic stand-in for the native core: the same names, no llama.cpp, no file.

Owns fake models ("fake:plain", "fake:window", "fake:recurrent", "fake:hybrid", "fake:embed", "fake:rank") and their
contexts. Logits are a hash of what the memory really holds for the sequence, so a wrong share, cut or restore shows
as wrong tokens. Facts go in the path: "fake:plain?n_ctx_train=512&n_vocab=300". For tests: `Context.step_delay_s`,
`Context.fail_next` and `Context.steps`. It refuses to say anything about speed or about real numbers.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.errors import Unsupported
from kvasir.native.fake_chat import ChatDelta, ChatParser, ChatPrompt, ChatTemplate
from kvasir.native.fake_context import KV_TYPES, Context, Row, Step
from kvasir.native.fake_memory import Memory
from kvasir.native.fake_model import Adapter, Model, logs, parse
from kvasir.native.fake_sampler import SAMPLER_NAMES, Sampler, SamplerParams, TokenLogprobs, json_schema_to_grammar
from kvasir.native.fake_vocab import Vocab

__all__ = [
    "KV_TYPES", "SAMPLER_NAMES", "Adapter", "ChatDelta", "ChatParser", "ChatPrompt", "ChatTemplate", "Context",
    "Device", "GgufFacts", "Memory", "Model", "Row", "Sampler", "SamplerParams", "Step", "TokenLogprobs", "Vocab",
    "build_info", "check_gguf", "devices", "json_schema_to_grammar", "llama_version", "quantize", "supports",
    "take_logs",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device as the core sees it."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a GGUF file says of itself before its tensors are read."""

    architecture: str
    name: str
    n_tensors: int
    n_kv: int
    file_type: str
    context_length: int
    block_count: int
    embedding_length: int
    n_vocab: int
    size_bytes: int


def llama_version() -> str:
    """Return the version of llama.cpp; here there is none."""
    return "fake"


def build_info() -> dict[str, str]:
    """Return how the core was built."""
    return {"backend": "fake", "llama_cpp": "fake", "kernels": "fake", "compiler": "none", "system_info": "none"}


def devices() -> list[Device]:
    """Return the devices a model may be put on."""
    return [Device("FAKE", "no device", "cpu", 1 << 30, 1 << 30)]


def supports() -> dict[str, bool]:
    """Return what this build can do."""
    return {"mmap": False, "mlock": False, "gpu_offload": False, "rpc": False}


def check_gguf(path: str) -> GgufFacts:
    """Return the facts of a fake model; `ModelLoadError` for any other path."""
    kind, facts = parse(path)
    return GgufFacts("fake", kind, 0, 0, "F32", facts["n_ctx_train"], 1, facts["n_embd"], facts["n_vocab"], 1)


def quantize(src: str, dst: str, *, to: str, threads: int = 0, progress: Callable[[float], bool] | None = None) -> None:
    """Refuse: a fake model has no weights to convert."""
    check_gguf(src)
    raise Unsupported(f"{src} has no weights that could be converted to {to}; load a real model.")


def take_logs(timeout_s: float) -> list[tuple[int, str]]:
    """Wait up to `timeout_s` for a line, then return all lines there are."""
    try:
        lines = [logs.get(timeout=max(timeout_s, 0.001))]
    except queue.Empty:
        return []
    while not logs.empty():
        lines.append(logs.get())
    return lines
