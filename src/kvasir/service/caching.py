"""How one open model uses the cache: which space its KV is in, when it is saved, and where.

Owns the mapping from load settings to the cache's own, and the facts that go into a key. The cache itself knows no
model, and the engine knows no file.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from types import ModuleType

from kvasir.cache import Cache, CacheSettings, SaveRules, Space
from kvasir.cache.settings import default_ram_bytes
from kvasir.config import LoadSettings, StoreSettings
from kvasir.engine import Binding
from kvasir.model.fingerprint import FingerprintMode, context_hash, file_hash, fingerprint
from kvasir.model.weights import Weights

# ggml's own numbers: a byte that means the same in every version.
KV_TYPE_BYTES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip


def cache_settings(settings: LoadSettings, store: StoreSettings) -> CacheSettings:
    """What the cache is told: its folders, its quotas and its pressure source."""
    ram_bytes = settings.cache_ram_bytes
    return CacheSettings(
        ram_bytes=default_ram_bytes() if ram_bytes is None else ram_bytes,
        tmpfs_dir=settings.cache_tmpfs_dir,
        tmpfs_bytes=settings.cache_tmpfs_bytes,
        disk_dir=settings.cache_dir or store.home / "kv",
        disk_bytes=settings.cache_disk_bytes,
        block_tokens=settings.block_tokens,
        pressure=settings.cache_pressure,
        pressure_high=settings.cache_pressure_high,
        pressure_low=settings.cache_pressure_low,
    )


def bind(cache: Cache, weights: Weights, settings: LoadSettings, store: StoreSettings, *, core: ModuleType) -> Binding:
    """Join one model to a cache. Hashes the model's file, once: later loads remember it."""
    mode, memory = FingerprintMode(settings.fingerprint_mode), store.home / "fingerprints.json"
    model = b"".join(file_hash(part, mode, memory) for part in model_files(weights.path))
    adapters = [(file_hash(path, mode, memory), scale) for path, scale in settings.adapters]
    build = " ".join(core.build_info()[fact] for fact in ("llama_cpp", "kernels", "backend"))
    name = partial(fingerprint, model, adapters=adapters, build=build)

    def space(scope: str | None, n_ctx_seq: int) -> Space:
        made = Space(
            fingerprint=name(scope=scope),
            type_k=KV_TYPE_BYTES[settings.type_k],
            type_v=KV_TYPE_BYTES[settings.type_v],
            context_hash=context_hash(_context_facts(settings, weights, n_ctx_seq)),
        )
        cache.limit(made, settings.cache_tiers)
        return made

    return Binding(cache, _rules(settings), space)


def model_files(path: Path) -> list[Path]:
    """Return the file, or every part of a split model, in order."""
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if split is None:
        return [path]
    stem, count = split.groups()
    return [path.with_name(f"{stem}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def _rules(settings: LoadSettings) -> SaveRules:
    return SaveRules(**{name: getattr(settings, name) for name in SaveRules.__struct_fields__})


def _context_facts(settings: LoadSettings, weights: Weights, n_ctx_seq: int) -> dict[str, object]:
    """Everything that changes what KV a token gets, besides weights and types.

    Not the context's size, with one exception: LongRoPE models take other factors beyond their original context.
    """
    metadata = weights.native.metadata
    rope = ("rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
            "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")  # fmt: skip
    arch = weights.native.architecture
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    is_longrope = metadata.get(f"{arch}.rope.scaling.type") == "longrope" or settings.rope_scaling == "longrope"
    return {
        **{name: getattr(settings, name) for name in rope},
        "flash_attn": settings.flash_attn != "off",
        "swa_full": settings.swa_full,
        "rotation": "LLAMA_ATTN_ROT_DISABLE" not in os.environ,
        "long": is_longrope and original is not None and n_ctx_seq > int(original),
    }
