"""The fake core's context: checks a step as the real one does, then decodes and samples it.

Owns the rules of a step: what is refused with `BadOption`, what comes back as a status, what is counted. Logits are
a hash of what `fake_memory` holds for the sequence. Test knobs: `step_delay_s`, `fail_next()`, `steps`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.errors import BadOption, Closed, Unsupported
from kvasir.native.fake_memory import Layout, Memory, mix
from kvasir.native.fake_model import Adapter, Model, one_of
from kvasir.native.fake_sampler import GrammarDead, Logits, Sampler, TokenLogprobs, logprobs_of
from kvasir.native.fake_vocab import Vocab

KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
_POOLINGS = ("none", "mean", "cls", "last", "rank")
_MAX_SEQ = 256  # llama.cpp's LLAMA_MAX_SEQ


class Row:
    """One sequence's part of a step: its next tokens, and what to make of the last one."""

    def __init__(
        self, seq: int, pos: int, tokens: list[int], sampler: Sampler | None = None, logprobs: int | None = None,
        output: bool = False,
    ) -> None:  # fmt: skip
        self.seq, self.pos, self.tokens = seq, pos, list(tokens)
        self.sampler, self.logprobs, self.output = sampler, logprobs, output


@dataclass(slots=True)
class Step:
    """What a step did; lists have one entry per row."""

    status: str
    tokens: list[int | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    decode_s: float = 0.0
    sample_s: float = 0.0


class Context:
    """A fake context. Test knobs: `step_delay_s`, `fail_next()` and `steps` (the rows of every step asked for)."""

    def __init__(
        self, model: Model, *, n_ctx: int = 0, n_batch: int = 512, n_ubatch: int = 512, n_seq_max: int = 1,
        threads: int = 0, threads_batch: int = 0, sample_threads: int = 0, poll: int = 50, kv_unified: bool = True,
        flash_attn: str = "auto", type_k: str = "f16", type_v: str = "f16", swa_full: bool = True,
        offload_kqv: bool = True, op_offload: bool = True, embeddings: bool = False, pooling: str = "model",
        attention: str = "model", rope_scaling: str = "model", rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0, yarn_ext_factor: float = -1.0, yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0, yarn_beta_slow: float = -1.0, yarn_orig_ctx: int = 0,
        adapters: list[tuple[Adapter, float]] | None = None,
    ) -> None:  # fmt: skip
        model._check_open()
        if model.vocab_only:
            raise Unsupported("this model was loaded with vocab_only and has no weights to run")
        n_ctx = n_ctx or model.n_ctx_train
        _check_sizes(n_ctx, n_batch, n_ubatch, n_seq_max, threads, threads_batch, sample_threads)
        one_of("flash_attn", flash_attn, ("auto", "on", "off"))
        one_of("type_k", type_k, KV_TYPES)
        one_of("type_v", type_v, KV_TYPES)
        one_of("pooling", pooling, ("model", *_POOLINGS))
        one_of("attention", attention, ("model", "causal", "non_causal"))
        one_of("rope_scaling", rope_scaling, ("model", "none", "linear", "yarn", "longrope"))
        if flash_attn == "off" and type_v not in ("f32", "f16", "bf16"):
            raise BadOption(f"type_v={type_v!r} needs flash attention, which is off")
        self.model, self.closed = model, False
        self.n_batch, self.n_ubatch, self.n_seq_max = min(n_batch, n_ctx), min(n_ubatch, n_batch), n_seq_max
        self.kv_unified = kv_unified
        pad = model.facts["ctx_pad"]
        self.n_ctx_seq = -(-(n_ctx if kv_unified else n_ctx // n_seq_max) // pad) * pad
        self.n_ctx = self.n_ctx_seq * (1 if kv_unified else n_seq_max)
        self.pooling = model.pooling if pooling == "model" else pooling
        self.n_rows_decoded = 0
        self.step_delay_s = 0.0
        self.steps: list[list[tuple[int, int, int]]] = []
        self._embeddings = embeddings
        self._abort = threading.Event()
        self._fail: str | None = None
        self._logits: dict[int, Logits] = {}
        self.set_threads(threads or 1, threads_batch or threads or 1)
        self.set_adapters(adapters or [])
        full = swa_full or model.memory_kind != "window"
        refusal = _shift_refusal(model.memory_kind, full, type_k, rope_scaling)
        layout = Layout(model.memory_kind, kv_unified, self.n_ctx_seq, n_seq_max, model.n_swa, full, refusal)
        self._memory = Memory(layout, self._check_open)

    @property
    def memory(self) -> Memory:
        """The KV memory; it lives as long as its context is open."""
        self._check_open()
        return self._memory

    def close(self) -> None:
        """Close; idempotent. Every later call raises `Closed`."""
        self.closed = True

    def step(self, rows: list[Row]) -> Step:
        """Decode all rows at once and sample those with a sampler. Not "ok" means nothing changed."""
        self._check_open()
        self._check_rows(rows)
        self.steps.append([(row.seq, row.pos, len(row.tokens)) for row in rows])
        started = time.perf_counter()
        status = self._refusal(rows)
        none: list[None] = [None] * len(rows)
        if status is not None:
            return Step(status, list(none), list(none), list(none))
        self._logits = {}
        for i, row in enumerate(rows):
            self._decode(i, row)
        decoded = time.perf_counter()
        step = Step("ok", list(none), list(none), list(none), decoded - started)
        for i, row in enumerate(rows):
            if row.sampler is not None:
                _sample(step, i, row.sampler, self._logits[i], row.logprobs)
        step.sample_s = time.perf_counter() - decoded
        return step

    def logits(self, row: int) -> Logits:
        """Return a copy of the logits of an output row of the last step."""
        self._check_open()
        if row not in self._logits:
            raise BadOption(f"row {row} of the last step has no output; give it a sampler or output=True")
        return self._logits[row].copy()

    def sample_stored(self, sampler: Sampler, logits: bytes, logprobs: int | None = None) -> Step:
        """Sample one row from logits that an earlier step left; nothing is decoded."""
        self._check_open()
        values = np.frombuffer(logits if len(logits) % 4 == 0 else b"", dtype=np.float32)
        n_vocab = self.model._vocab.n_tokens
        if len(values) != n_vocab:
            raise BadOption(f"these bytes are {len(values)} logits, and the vocabulary has {n_vocab} tokens")
        if logprobs is not None and logprobs < 0:
            raise BadOption(f"logprobs must be 0 or more, got {logprobs}")
        step = Step("ok", [None], [None], [None])
        _sample(step, 0, sampler, values, logprobs)
        return step

    def embed(self, texts: list[list[int]]) -> NDArray[np.float32]:
        """Return one vector per text, in order."""
        self._check_embed(texts)
        if self.pooling == "none":
            raise BadOption("pooling is 'none': there is one vector per token; use embed_tokens()")
        n_out = self.model.n_cls_out if self.pooling == "rank" else self.model.n_embd_out
        self.n_rows_decoded += sum(map(len, texts))
        vectors = [_vectors(tokens, n_out, self._salt).mean(axis=0) for tokens in texts]
        return np.array(vectors, dtype=np.float32).reshape(len(texts), n_out)

    def embed_tokens(self, tokens: list[int]) -> NDArray[np.float32]:
        """Return one vector per token; for contexts with pooling "none"."""
        self._check_embed([tokens])
        if self.pooling != "none":
            raise BadOption(f"pooling is {self.pooling!r}: there is one vector per text; use embed()")
        self.n_rows_decoded += len(tokens)
        return _vectors(tokens, self.model.n_embd_out, self._salt)

    def set_threads(self, threads: int, threads_batch: int) -> None:
        """Note the number of threads; the fake uses one."""
        self._check_open()
        if threads < 1 or threads_batch < 1:
            raise BadOption(f"threads must be 1 or more, got {threads} and {threads_batch}")
        self.threads, self.threads_batch = threads, threads_batch

    def set_adapters(self, adapters: list[tuple[Adapter, float]]) -> None:
        """Replace the adapters for everything decoded from now on."""
        self._check_open()
        for adapter, _ in adapters:
            if adapter.closed:
                raise Closed("this adapter is closed; load it again")
            if adapter.model is not self.model:
                raise BadOption("this adapter was loaded for another model")
        used = [(adapter.metadata["general.name"], scale) for adapter, scale in adapters if scale != 0]
        self._salt = int.from_bytes(hashlib.md5(repr(used).encode()).digest()[:8], "little")

    def abort(self) -> None:
        """Stop the running step, or the next one; from any thread."""
        self._abort.set()

    def clear_abort(self) -> None:
        """Allow steps again."""
        self._abort.clear()

    def synchronize(self) -> None:
        """Do nothing: a fake step is complete when it returns."""
        self._check_open()

    def fail_next(self, status: str) -> None:
        """Let the next step return this status and change nothing."""
        one_of("status", status, ("no_room", "aborted", "bad_batch", "failed"))
        self._fail = status

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this context is closed; make a new one")

    def _check_rows(self, rows: list[Row]) -> None:
        if self.model.memory_kind == "none" or self._embeddings:
            raise BadOption("this context makes embeddings; make one with embeddings=False to generate")
        if not rows or any(not row.tokens for row in rows):
            raise BadOption("a step needs at least one row, and every row at least one token")
        if len({row.seq for row in rows}) < len(rows):
            raise BadOption("a sequence appears twice in one step")
        n_tokens = sum(len(row.tokens) for row in rows)
        if n_tokens > self.n_batch:
            raise BadOption(f"a step takes {self.n_batch} tokens (n_batch), got {n_tokens}")
        for row in rows:
            if not 0 <= row.seq < self.n_seq_max:
                raise BadOption(f"sequence {row.seq} does not exist; this context has 0 to {self.n_seq_max - 1}")
            if row.pos < 0:
                raise BadOption(f"a position must be 0 or more, got {row.pos}")
            if row.logprobs is not None and row.logprobs < 0:
                raise BadOption(f"logprobs must be 0 or more, got {row.logprobs}")
            for token in row.tokens:
                self.model._vocab.check(token)

    def _refusal(self, rows: list[Row]) -> str | None:
        fail, self._fail = self._fail, None
        if fail is not None:
            return fail
        for row in rows:
            end = self._memory.pos_max(row.seq)
            if row.pos != (0 if end is None else end + 1):
                return "bad_batch"
        if self._aborted():
            return "aborted"
        if self.model.memory_kind == "recurrent":
            return None
        wanted: dict[int, int] = {}
        for row in rows:
            stream = 0 if self.kv_unified else row.seq
            wanted[stream] = wanted.get(stream, 0) + len(row.tokens)
        return "no_room" if any(n > self._memory.n_free(stream) for stream, n in wanted.items()) else None

    def _aborted(self) -> bool:
        """Wait as long as a step shall take; an abort cuts it short only where llama.cpp's would be safe."""
        if self._abort.is_set():
            return True
        if self.model.memory_kind in ("recurrent", "hybrid"):
            time.sleep(self.step_delay_s)
            return False
        return self._abort.wait(self.step_delay_s) if self.step_delay_s > 0 else False

    def _decode(self, index: int, row: Row) -> None:
        for token in row.tokens:
            self._memory.append(row.seq, token, self._salt)
        self.n_rows_decoded += len(row.tokens)
        if row.output or row.sampler is not None:
            digest = self._memory.digest(row.seq, self._salt)
            self._logits[index] = _logits(digest, self.model._vocab, self.model.facts["eog_every"])

    def _check_embed(self, texts: list[list[int]]) -> None:
        self._check_open()
        if not self._embeddings:
            raise BadOption("this context does not make embeddings; make one with embeddings=True")
        for tokens in texts:
            if not 0 < len(tokens) <= self.n_batch:
                raise BadOption(f"a text to embed has 1 to {self.n_batch} tokens, got {len(tokens)}")
            for token in tokens:
                self.model._vocab.check(token)


def _sample(step: Step, index: int, sampler: Sampler, logits: Logits, logprobs: int | None) -> None:
    try:
        token = sampler.choose(logits)
    except GrammarDead as error:
        step.errors[index] = str(error)
        return
    sampler.accept(token)
    step.tokens[index] = token
    if logprobs is not None:
        step.logprobs[index] = logprobs_of(logits, token, logprobs)


def _check_sizes(n_ctx: int, n_batch: int, n_ubatch: int, n_seq_max: int, *threads: int) -> None:
    if n_ctx < 1 or n_batch < 1 or n_ubatch < 1:
        raise BadOption(f"n_ctx, n_batch and n_ubatch must be above 0, got {n_ctx}, {n_batch} and {n_ubatch}")
    if not 1 <= n_seq_max <= _MAX_SEQ:
        raise BadOption(f"n_seq_max must be 1 to {_MAX_SEQ}, got {n_seq_max}")
    if min(n_batch, n_ctx) < n_seq_max:
        raise BadOption(f"n_batch and n_ctx must be at least n_seq_max ({n_seq_max}), got {n_batch} and {n_ctx}")
    if min(threads) < 0:
        raise BadOption(f"threads must be 0 (automatic) or more, got {min(threads)}")


def _shift_refusal(kind: str, keeps_window: bool, type_k: str, rope_scaling: str) -> str | None:
    if kind in ("recurrent", "hybrid", "none"):
        return f"a {kind} memory has no positions to move"
    if not keeps_window:
        return "the window memory forgets old cells (swa_full=False)"
    if type_k not in ("f16", "f32"):
        return f"keys of type {type_k} cannot be rotated"
    return "YaRN scales the keys again with every shift" if rope_scaling == "yarn" else None


def _noise(digest: int, n: int) -> NDArray[np.float64]:
    """Return `n` numbers in [0, 1) that depend on the digest alone."""
    h = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(digest)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.float64] = (h >> np.uint64(11)).astype(np.float64) / 2**53
    return result


def _logits(digest: int, vocab: Vocab, eog_every: int) -> Logits:
    """Letters and spaces are likely, other printable bytes less; one position in `eog_every` wants to end."""
    bias = np.full(vocab.n_tokens, -8.0)
    bias[32:127] = 2.0
    bias[[32, *range(97, 123), 256, 257, 258]] = 6.0
    scores = _noise(digest, vocab.n_tokens) * 5.0 + bias
    if eog_every and mix(digest) % eog_every == 0:
        scores[vocab.eot] = 16.0
    result: Logits = scores.astype(np.float32)
    return result


def _vectors(tokens: list[int], n_out: int, salt: int) -> NDArray[np.float32]:
    rows = [_noise(mix(salt, token, i), n_out) - 0.5 for i, token in enumerate(tokens)]
    return np.array(rows, dtype=np.float32).reshape(len(tokens), n_out)
