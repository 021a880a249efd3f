"""A LoRA adapter for the tiny llama: it changes every layer enough to change the text."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.models.architectures import HEAD, N_EMBD, N_HEAD, N_HEAD_KV

_RANK = 4


def write_lora(path: Path, *, seed: int = 1) -> Path:
    """Write the adapter and return its path."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(_RANK))
    for layer in ("blk.0", "blk.1"):
        for name, n_out in (("attn_q", N_HEAD * HEAD), ("attn_v", N_HEAD_KV * HEAD)):
            for part, shape in (("lora_a", (_RANK, N_EMBD)), ("lora_b", (n_out, _RANK))):
                values = random.standard_normal(shape) * 0.3
                writer.add_tensor(f"{layer}.{name}.weight.{part}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
