"""The cache: 32-byte keys to opaque bytes, in RAM, tmpfs and disk. Knows no llama.cpp, no slot and no text."""

from kvasir.cache.cache import Cache
from kvasir.cache.key import Key, Space
from kvasir.cache.loading import Loading
from kvasir.cache.match import Lease, Match
from kvasir.cache.policy import SaveRules, cold_end, continued_end, last_end, spans
from kvasir.cache.report import Listed, Verified
from kvasir.cache.row import Miss, Needs, Part, Reason, Row, Why
from kvasir.cache.settings import CacheSettings
from kvasir.cache.stats import CacheStats, TierStats

__all__ = [
    "Cache",
    "CacheSettings",
    "CacheStats",
    "Key",
    "Lease",
    "Listed",
    "Loading",
    "Match",
    "Miss",
    "Needs",
    "Part",
    "Reason",
    "Row",
    "SaveRules",
    "Space",
    "TierStats",
    "Verified",
    "Why",
    "cold_end",
    "continued_end",
    "last_end",
    "spans",
]
