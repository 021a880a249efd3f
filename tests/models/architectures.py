"""One writer per architecture: which keys and tensors llama.cpp wants of it, at the smallest useful size.

Owns the shapes. They are written as (out, in), the way numpy sees them; GGUF stores the same bytes with the fastest
dimension first. Vectors, convolutions and state matrices are F32 because ggml insists; the rest is F32 because
the files are small anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tests.models.vocabulary import BPE_TOKENS, WORD_PIECES, add_bpe, add_word_pieces, liking

# A head of 32 so that quantised KV types, whose blocks are 32 wide, can be used.
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD = 64, 128, 2, 1, 32
CONTEXT = 2048
WINDOW = 32
# The residual stream is normalised before the output, so this gives logits a spread of about 4: two tokens nearly
# never come close enough for rounding to swap them.
OUTPUT_SCALE = 0.5


class Target(NamedTuple):
    """Where a model goes, from which seed, and what to spoil in it before it is written."""

    path: Path
    seed: int
    edit: Callable[[gguf.GGUFWriter], None] | None


class TinyWriter:
    """A GGUF being written, with random tensors from one seed."""

    def __init__(self, target: Target, arch: str, n_layer: int, *, context: int = CONTEXT) -> None:
        self._random = np.random.default_rng([target.seed, *arch.encode()])
        self._edit = target.edit
        self.keys = gguf.GGUFWriter(target.path, arch)
        self.keys.add_name(f"tiny {arch}")
        self.keys.add_context_length(context)
        self.keys.add_embedding_length(N_EMBD)
        self.keys.add_block_count(n_layer)

    def matrix(self, name: str, n_out: int, n_in: int, scale: float | None = None) -> None:
        spread = scale if scale is not None else n_in**-0.5
        self.keys.add_tensor(name, (self._random.standard_normal((n_out, n_in)) * spread).astype(np.float32))

    def vector(self, name: str, n: int, *, around: float = 1.0) -> None:
        self.keys.add_tensor(name, (around + 0.1 * self._random.standard_normal(n)).astype(np.float32))

    def embeddings(self, n_vocab: int) -> None:
        self.matrix("token_embd.weight", n_vocab, N_EMBD, 1.0)

    def output(self) -> None:
        n_vocab = len(BPE_TOKENS)
        rows = self._random.standard_normal((n_vocab, N_EMBD)) * OUTPUT_SCALE * liking()[:, None]
        self.keys.add_tensor("output.weight", rows.astype(np.float32))

    def attention(self, layer: str, n_head_kv: int = N_HEAD_KV) -> None:
        self.matrix(f"{layer}.attn_q.weight", N_HEAD * HEAD, N_EMBD, 0.3)
        self.matrix(f"{layer}.attn_k.weight", n_head_kv * HEAD, N_EMBD, 0.3)
        self.matrix(f"{layer}.attn_v.weight", n_head_kv * HEAD, N_EMBD)
        # Sharper and louder than a trained model: the text must depend on all that came before.
        self.matrix(f"{layer}.attn_output.weight", N_EMBD, N_HEAD * HEAD, 0.5)

    def feed_forward(self, layer: str, *, gated: bool = True) -> None:
        if gated:
            self.vector(f"{layer}.ffn_norm.weight", N_EMBD)
            self.matrix(f"{layer}.ffn_gate.weight", N_FF, N_EMBD)
        self.matrix(f"{layer}.ffn_up.weight", N_FF, N_EMBD)
        self.matrix(f"{layer}.ffn_down.weight", N_EMBD, N_FF)

    def norm(self, name: str) -> None:
        self.vector(f"{name}.weight", N_EMBD)

    def head_norms(self, layer: str) -> None:
        self.vector(f"{layer}.attn_q_norm.weight", HEAD, around=2.0)
        self.vector(f"{layer}.attn_k_norm.weight", HEAD, around=2.0)

    def norm_and_bias(self, name: str) -> None:
        self.vector(f"{name}.weight", N_EMBD)
        self.vector(f"{name}.bias", N_EMBD, around=0.0)

    def heads(self) -> None:
        self.keys.add_feed_forward_length(N_FF)
        self.keys.add_head_count(N_HEAD)
        self.keys.add_head_count_kv(N_HEAD_KV)
        self.keys.add_layer_norm_rms_eps(1e-5)

    def finish(self) -> None:
        if self._edit is not None:
            self._edit(self.keys)
        self.keys.write_header_to_file()
        self.keys.write_kv_data_to_file()
        self.keys.write_tensors_to_file()
        self.keys.close()


def write_llama(target: Target) -> None:
    """Plain attention over everything."""
    tiny = TinyWriter(target, "llama", 2)
    tiny.heads()
    tiny.keys.add_rope_dimension_count(HEAD)
    add_bpe(tiny.keys)
    tiny.embeddings(len(BPE_TOKENS))
    for layer in ("blk.0", "blk.1"):
        tiny.norm(f"{layer}.attn_norm")
        tiny.attention(layer)
        tiny.feed_forward(layer)
    tiny.norm("output_norm")
    tiny.output()
    tiny.finish()


def write_gemma3(target: Target) -> None:
    """Every second layer sees only a window."""
    tiny = TinyWriter(target, "gemma3", 2)
    tiny.heads()
    tiny.keys.add_key_length(HEAD)
    tiny.keys.add_value_length(HEAD)
    tiny.keys.add_sliding_window(WINDOW)
    tiny.keys.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    add_bpe(tiny.keys)
    tiny.embeddings(len(BPE_TOKENS))
    for layer in ("blk.0", "blk.1"):
        tiny.norm(f"{layer}.attn_norm")
        for name in ("post_attention_norm", "post_ffw_norm"):
            tiny.vector(f"{layer}.{name}.weight", N_EMBD, around=6.0)  # gemma multiplies its embeddings by 8
        tiny.head_norms(layer)
        tiny.attention(layer)
        tiny.feed_forward(layer)
    tiny.norm("output_norm")
    tiny.output()
    tiny.finish()


def write_mamba(target: Target) -> None:
    """Recurrent: one state, no history."""
    n_conv, n_state, n_rank, n_inner = 4, 16, 4, 2 * N_EMBD
    tiny = TinyWriter(target, "mamba", 2)
    tiny.keys.add_layer_norm_rms_eps(1e-5)
    tiny.keys.add_ssm_conv_kernel(n_conv)
    tiny.keys.add_ssm_inner_size(n_inner)
    tiny.keys.add_ssm_state_size(n_state)
    tiny.keys.add_ssm_time_step_rank(n_rank)
    add_bpe(tiny.keys)
    tiny.embeddings(len(BPE_TOKENS))
    for layer in ("blk.0", "blk.1"):
        tiny.norm(f"{layer}.attn_norm")
        tiny.matrix(f"{layer}.ssm_in.weight", 2 * n_inner, N_EMBD)
        tiny.matrix(f"{layer}.ssm_conv1d.weight", n_inner, n_conv)
        tiny.vector(f"{layer}.ssm_conv1d.bias", n_inner, around=0.0)
        tiny.matrix(f"{layer}.ssm_x.weight", n_rank + 2 * n_state, n_inner)
        tiny.matrix(f"{layer}.ssm_dt.weight", n_inner, n_rank)
        tiny.vector(f"{layer}.ssm_dt.bias", n_inner, around=0.0)
        # Negative, or the state grows without bound.
        decay = -np.tile(np.arange(1, n_state + 1, dtype=np.float32) / n_state, (n_inner, 1))
        tiny.keys.add_tensor(f"{layer}.ssm_a", decay)
        tiny.vector(f"{layer}.ssm_d", n_inner)
        tiny.matrix(f"{layer}.ssm_out.weight", N_EMBD, n_inner)
    tiny.norm("output_norm")
    tiny.output()
    tiny.finish()


def write_lfm2(target: Target) -> None:
    """Hybrid: short convolutions with a state, and attention in every second layer."""
    n_conv = 3
    per_layer = [0, N_HEAD_KV, 0, N_HEAD_KV]  # 0 heads: a recurrent layer
    tiny = TinyWriter(target, "lfm2", len(per_layer))
    tiny.keys.add_feed_forward_length(N_FF)
    tiny.keys.add_head_count(N_HEAD)
    tiny.keys.add_head_count_kv(per_layer)
    tiny.keys.add_layer_norm_rms_eps(1e-5)
    tiny.keys.add_shortconv_l_cache(n_conv)
    add_bpe(tiny.keys)
    tiny.embeddings(len(BPE_TOKENS))
    for i, n_head_kv in enumerate(per_layer):
        layer = f"blk.{i}"
        tiny.norm(f"{layer}.attn_norm")
        tiny.feed_forward(layer)
        if n_head_kv:
            tiny.attention(layer, n_head_kv)
            tiny.head_norms(layer)
        else:
            tiny.matrix(f"{layer}.shortconv.conv.weight", N_EMBD, n_conv)
            tiny.matrix(f"{layer}.shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD)
            tiny.matrix(f"{layer}.shortconv.out_proj.weight", N_EMBD, N_EMBD)
    tiny.norm("token_embd_norm")
    tiny.output()
    tiny.finish()


def write_bert(target: Target) -> None:
    """An encoder whose vector is the mean of its tokens."""
    tiny = _encoder(target, gguf.PoolingType.MEAN)
    tiny.finish()


def write_rank(target: Target) -> None:
    """An encoder that scores a pair of texts with one number."""
    tiny = _encoder(target, gguf.PoolingType.RANK)
    tiny.keys.add_classifier_output_labels(["score"])
    tiny.matrix("cls.weight", N_EMBD, N_EMBD)
    tiny.vector("cls.bias", N_EMBD, around=0.0)
    tiny.matrix("cls.output.weight", 1, N_EMBD)
    tiny.vector("cls.output.bias", 1, around=0.0)
    tiny.finish()


def _encoder(target: Target, pooling: gguf.PoolingType) -> TinyWriter:
    context = 512
    tiny = TinyWriter(target, "bert", 2, context=context)
    tiny.keys.add_feed_forward_length(N_FF)
    tiny.keys.add_head_count(N_HEAD)
    tiny.keys.add_layer_norm_eps(1e-6)
    tiny.keys.add_causal_attention(False)
    tiny.keys.add_pooling_type(pooling)
    add_word_pieces(tiny.keys)
    tiny.embeddings(len(WORD_PIECES))
    tiny.matrix("token_types.weight", 2, N_EMBD, 0.1)
    tiny.matrix("position_embd.weight", context, N_EMBD, 0.1)
    tiny.norm_and_bias("token_embd_norm")
    for layer in ("blk.0", "blk.1"):
        tiny.attention(layer, N_HEAD)
        tiny.norm_and_bias(f"{layer}.attn_output_norm")
        tiny.feed_forward(layer, gated=False)
        tiny.norm_and_bias(f"{layer}.layer_output_norm")
    return tiny


WRITERS: dict[str, Callable[[Target], None]] = {
    "llama": write_llama,
    "gemma3": write_gemma3,
    "mamba": write_mamba,
    "lfm2": write_lfm2,
    "bert": write_bert,
    "rank": write_rank,
}


def write_model(name: str, path: Path, *, seed: int = 1, edit: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """Write the tiny model of this name and return its path; `edit` may spoil keys and tensors first."""
    WRITERS[name](Target(path, seed, edit))
    return path
