"""What the engine is told when it opens, and the rules that fill in what was left to it.

Owns the defaults of threads and KV layout. Reads no environment and no file: the caller has,
and hands over values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvasir.errors import BadOption, ModelLoadError, suggest

LAYOUTS = ("auto", "unified", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one engine runs.

    `context_size` counts all cells (0: the model's trained context). `context` holds further keyword arguments of
    `native.Context` (KV types, rope, adapters). `observe` gets every event value, on the engine thread.
    """

    slots: int = 4
    layout: str = "auto"
    strategy: object = "DecodeMaximal"
    chunk_tokens: int = 512  # prompt rows of a tick, alone or beside streams of the same burst
    prefill_budget: int = 128  # beside streams that ran before: a gap of about a quarter second on two cores
    max_queue: int = 64
    context_size: int = 0
    batch: int = 512
    ubatch: int = 512
    threads: int = 0  # 0: every physical core this process may use
    aging_s: float = 5.0  # a waiting request gains one priority level in this time
    debug: bool = False  # check the ledgers against the native memory after every tick
    context: Mapping[str, Any] = field(default_factory=dict)
    observe: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadOption(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.layout not in LAYOUTS:
            known = ", ".join(LAYOUTS)
            raise BadOption(f"layout must be one of {known}, got {self.layout!r}.{suggest(str(self.layout), LAYOUTS)}")
        if not self.aging_s > 0:
            raise BadOption(f"aging_s must be above 0, got {self.aging_s!r}.")
        if self.batch < self.slots:
            raise BadOption(f"batch is {self.batch} and must be at least slots, {self.slots}.")


_LEAST = {
    "slots": 1, "chunk_tokens": 1, "prefill_budget": 1, "max_queue": 0, "context_size": 0, "batch": 1, "ubatch": 1,
    "threads": 0,
}  # fmt: skip


class Layout(NamedTuple):
    """How KV memory is laid out, and how many cells it has in all."""

    unified: bool
    n_ctx: int


# What an open context_size may take for a whole trained context in every slot: small models get it, large ones do not.
SPLIT_SHARE = 1 / 8


def layout_of(settings: EngineSettings, model: Any, *, available: int) -> Layout:
    """Resolve layout and size of the context.

    `auto` is split where that takes nothing from anybody: every slot gets the model's whole trained context, because
    `context_size` says so, or because it is open and that takes at most an eighth of the memory there is. Then nobody
    pays for another's cells, and where a sequence's cells lie, and so how its sums are rounded, depends on it alone.
    Everything else is unified: a prompt that fits `context_size` must not be refused because slots divide it.
    """
    trained, slots = model.n_ctx_train, settings.slots
    whole = trained * slots
    wanted = settings.context_size
    if not wanted and trained > 0 and settings.layout != "unified":
        fits = kv_bytes(model, whole, settings.context) <= SPLIT_SHARE * available
        wanted = whole if fits else 0
    n_ctx = wanted or trained
    if settings.layout != "auto":
        return Layout(settings.layout == "unified", n_ctx)
    return Layout(slots == 1 or trained <= 0 or n_ctx < whole, n_ctx)


def sequence_limit(settings: EngineSettings, *, n_ctx_seq: int, n_ctx_train: int) -> int:
    """Tokens one sequence may have: its cells, and not beyond the trained context unless rope is stretched."""
    stretched = settings.context.get("rope_scaling", "model") in ("linear", "yarn", "longrope")
    stretched = stretched or bool(settings.context.get("rope_freq_base") or settings.context.get("rope_freq_scale"))
    return n_ctx_seq if stretched or n_ctx_train <= 0 else min(n_ctx_seq, n_ctx_train)


# Bytes of one value. Quantised types store a block of 32 with its scale.
_VALUE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
# llama.cpp's own note of each cell: position, shift, extras and the set of its sequences.
_CELL_BYTES = 64


def kv_bytes(model: Any, n_ctx: int, context: Mapping[str, Any]) -> int:
    """Estimate what a context of so many cells takes; for sliding windows and latent attention it is an upper bound."""
    values = model.n_embd // max(1, model.n_head) * model.n_head_kv * model.n_layer
    each = sum(_VALUE_BYTES.get(str(context.get(name, "f16")), 2.0) for name in ("type_k", "type_v"))
    return int(n_ctx * (values * each + _CELL_BYTES))


def check_memory(model: Any, n_ctx: int, context: Mapping[str, Any], *, available: int) -> None:
    """Refuse a context that this machine cannot hold: the system would end the process while it is being made."""
    if (wanted := kv_bytes(model, n_ctx, context)) > available:
        raise ModelLoadError(
            f"a context of {n_ctx:,} tokens needs about {wanted / 2**30:,.1f} GiB of KV memory and "
            f"{available / 2**30:,.1f} GiB are there; lower context_size, or choose smaller type_k and type_v.",
            reason="not enough memory",
        )


def default_threads() -> int:
    """Count the physical cores this process may use; hyperthreads of one core only spin against each other."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, len({_core_of(cpu) for cpu in allowed}))


def _core_of(cpu: int) -> str:
    """Name the physical core of a logical cpu by its siblings; unknown systems count every cpu as a core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
