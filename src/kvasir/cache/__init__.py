"""The cache: 32-byte keys to opaque bytes, in RAM, tmpfs and disk. Knows no llama.cpp, no slot and no text."""

from kvasir.cache.cache import Cache, Loading, Match
from kvasir.cache.key import Key, Space
from kvasir.cache.policy import SaveRules, cold_end, continued_end, last_end, spans
from kvasir.cache.row import Miss, Needs, Part, Reason, Row, Why
from kvasir.cache.settings import CacheSettings

__all__ = [
    "Cache",
    "CacheSettings",
    "Key",
    "Loading",
    "Match",
    "Miss",
    "Needs",
    "Part",
    "Reason",
    "Row",
    "SaveRules",
    "Space",
    "Why",
    "cold_end",
    "continued_end",
    "last_end",
    "spans",
]
