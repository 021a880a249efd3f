"""What a model is on disk and in memory: references, the store, weights, vocabulary, sampler chains.

Knows files and the native core; knows nothing of scheduling, caching or chat. Nothing is imported here, so that a
command which only lists models loads no native code; `convert` is found when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvasir.model.conversion import convert

__all__ = ["convert"]


def __getattr__(name: str) -> Any:
    if name != "convert":
        raise AttributeError(f"module 'kvasir.model' has no attribute {name!r}")
    return import_module("kvasir.model.conversion").convert
