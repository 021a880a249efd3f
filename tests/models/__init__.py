"""Tiny GGUF files with random weights, one per kind of memory.

Owns what the tests load instead of real models: each file is written in well under a second, is far below 1 MB,
and is the same, byte for byte, for the same seed. The text such a model makes means nothing; that it makes the
same text twice means a lot.
"""

from tests.models.architectures import WRITERS, write_model
from tests.models.lora import write_lora

__all__ = ["WRITERS", "write_lora", "write_model"]
