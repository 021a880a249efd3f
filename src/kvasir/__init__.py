"""Kvasir runs GGUF models with llama.cpp, for many users at once.

The front door. `load()` opens a model; what it returns does the rest:

>>> import kvasir
>>> with kvasir.load() as model:
...     print(model.generate("Once upon a time", max_tokens=32).text)

Importing it is cheap: the engine and the native core are loaded by the first use of `load`, `Model` or `Stream`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvasir.errors import KvasirError
from kvasir.types import Completion, FinishReason, Sampling, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from kvasir.chat import ChatReply, Tool
    from kvasir.model.weights import ModelInfo
    from kvasir.service import Model, Stream, load
    from kvasir.service.runtime import Runtime
    from kvasir.service.sessions import Service

__version__ = "0.1.0"

__all__ = [
    "ChatReply",
    "Completion",
    "FinishReason",
    "KvasirError",
    "Model",
    "ModelInfo",
    "Runtime",
    "Sampling",
    "Service",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tool",
    "Usage",
    "load",
]

_LAZY = {
    "ChatReply": "kvasir.chat",
    "Model": "kvasir.service",
    "ModelInfo": "kvasir.model.weights",
    "Runtime": "kvasir.service.runtime",
    "Service": "kvasir.service.sessions",
    "Stream": "kvasir.service",
    "Tool": "kvasir.chat",
    "load": "kvasir.service",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvasir' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
