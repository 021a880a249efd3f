"""What the user set becomes what the engine and its context are told.

Owns that mapping and nothing else: the values were checked by `kvasir.config`, and the engine fills in what is open.
"""

from __future__ import annotations

from typing import Any

from kvasir.config import LoadSettings
from kvasir.engine import EngineSettings

# Options that the context takes by the same name.
_CONTEXT_OPTIONS = (
    "flash_attn", "type_k", "type_v", "swa_full", "offload_kqv", "op_offload", "rope_scaling", "rope_freq_base",
    "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip


def context_options(settings: LoadSettings, adapters: list[tuple[Any, float]]) -> dict[str, Any]:
    """The keyword arguments of `native.Context` that do not depend on what the context is for."""
    options = {name: getattr(settings, name) for name in _CONTEXT_OPTIONS}
    return {**options, "adapters": list(adapters)}


def engine_settings(settings: LoadSettings, adapters: list[tuple[Any, float]]) -> EngineSettings:
    """What the engine is told."""
    context = context_options(settings, adapters)
    if settings.threads_batch is not None:
        context["threads_batch"] = settings.threads_batch
    return EngineSettings(
        slots=settings.slots,
        layout=settings.layout,
        strategy=settings.strategy,
        chunk_tokens=settings.chunk_tokens,
        prefill_budget=settings.prefill_budget,
        max_queue=settings.max_queue,
        context_size=settings.context_size or 0,
        batch=settings.batch,
        ubatch=settings.ubatch,
        threads=settings.threads or 0,
        context=context,
        observe=settings.observe,
    )
