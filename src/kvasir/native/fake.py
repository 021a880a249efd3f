"""A deterministic stand-in for the native core: the same names, no llama.cpp, no file.

Owns fake models ("fake:plain", "fake:window", "fake:recurrent", "fake:hybrid", "fake:embed", "fake:rank") and their
contexts. Logits are a hash of what the memory really holds for the sequence, so a wrong share, cut or restore shows
as wrong tokens. Facts go in the path: "fake:plain?n_ctx_train=512&n_vocab=300". For tests: `Context.step_delay_s`,
`Context.fail_next` and `Context.steps`. It refuses to say anything about speed or about real numbers.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from kvasir.errors import BadOption, Closed, ModelLoadError, Unsupported, suggest
from kvasir.native.fake_memory import Layout, Memory, mix
from kvasir.native.fake_sampler import (
    MIN_VOCAB,
    SAMPLER_NAMES,
    GrammarDead,
    Logits,
    Sampler,
    SamplerParams,
    TokenLogprobs,
    Vocab,
    json_schema_to_grammar,
    logprobs_of,
)

__all__ = [
    "KV_TYPES", "SAMPLER_NAMES", "Adapter", "Context", "Device", "GgufFacts", "Memory", "Model", "Row", "Sampler",
    "SamplerParams", "Step", "TokenLogprobs", "Vocab", "build_info", "check_gguf", "devices",
    "json_schema_to_grammar", "llama_version", "supports", "take_logs",
]  # fmt: skip

KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
_KINDS = {"plain": "plain", "window": "window", "recurrent": "recurrent", "hybrid": "hybrid", "embed": "none",
          "rank": "none"}  # fmt: skip
_FACTS = {"n_ctx_train": 2048, "n_vocab": MIN_VOCAB, "n_embd": 32, "window": 32, "ctx_pad": 1, "add_bos": 0,
          "eog_every": 64}  # fmt: skip
_POOLINGS = ("none", "mean", "cls", "last", "rank")
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MAX_SEQ = 256  # llama.cpp's LLAMA_MAX_SEQ
_logs: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class GgufFacts:
    architecture: str
    name: str
    n_tensors: int
    n_kv: int
    file_type: str
    context_length: int
    block_count: int
    embedding_length: int
    n_vocab: int
    size_bytes: int


def llama_version() -> str:
    return "fake"


def build_info() -> dict[str, str]:
    return {"backend": "fake", "llama_cpp": "fake", "compiler": "none", "system_info": "none"}


def devices() -> list[Device]:
    return [Device("FAKE", "no device", "cpu", 1 << 30, 1 << 30)]


def supports() -> dict[str, bool]:
    return {"mmap": False, "mlock": False, "gpu_offload": False, "rpc": False}


def check_gguf(path: str) -> GgufFacts:
    kind, facts = _parse(path)
    return GgufFacts("fake", kind, 0, 0, "F32", facts["n_ctx_train"], 1, facts["n_embd"], facts["n_vocab"], 1)


def take_logs(timeout_s: float) -> list[tuple[int, str]]:
    """Wait up to `timeout_s` for a line, then return all lines there are."""
    try:
        lines = [_logs.get(timeout=max(timeout_s, 0.001))]
    except queue.Empty:
        return []
    while not _logs.empty():
        lines.append(_logs.get())
    return lines


class Model:
    """A model without weights. `load` takes "fake:<kind>?<fact>=<value>&..."; every other path fails to load."""

    is_diffusion = False
    rope_type = "norm"
    file_type = "F32"
    architecture = "fake"
    n_params, n_bytes, n_layer, n_head, n_head_kv = 1000, 4000, 1, 1, 1

    def __init__(self, kind: str, facts: dict[str, int], *, vocab_only: bool) -> None:
        self.closed = False
        self.vocab_only = vocab_only
        self.facts = facts
        self.description = f"fake {kind}"
        self.memory_kind = _KINDS[kind]
        self.has_encoder = self.memory_kind == "none"
        self.has_decoder = not self.has_encoder
        self.pooling = {"embed": "mean", "rank": "rank"}.get(kind, "none")
        self.n_ctx_train, self.n_embd, self.n_embd_out = facts["n_ctx_train"], facts["n_embd"], facts["n_embd"]
        self.n_swa = facts["window"] if kind == "window" else 0
        self.n_cls_out = 1
        self.metadata = {"general.architecture": "fake", "general.name": kind, "tokenizer.chat_template": _CHATML}
        self._vocab = Vocab(facts["n_vocab"], add_bos=bool(facts["add_bos"]))

    @staticmethod
    def load(
        path: str, *, gpu_layers: int = -1, split_mode: str = "layer", main_gpu: int = 0,
        tensor_split: list[float] | None = None, devices: list[str] | None = None, use_mmap: bool = True,
        use_mlock: bool = False, vocab_only: bool = False, check_tensors: bool = False,
        progress: Callable[[float], bool] | None = None,
    ) -> Model:  # fmt: skip
        kind, facts = _parse(path)
        _one_of("split_mode", split_mode, ("none", "layer", "row"))
        for name in devices or []:
            _one_of("device", name, ("FAKE", "none"))
        for done in (0.0, 0.5, 1.0):
            if progress is not None and not progress(done):
                raise ModelLoadError(f"loading {path} was stopped by the progress callback")
        _logs.put((20, f"loaded {path}"))
        return Model(kind, facts, vocab_only=vocab_only)

    @property
    def vocab(self) -> Vocab:
        self._check_open()
        return self._vocab

    def chat_template(self, name: str | None = None) -> str | None:
        self._check_open()
        return _CHATML if name is None else None

    def load_adapter(self, path: str) -> Adapter:
        self._check_open()
        if not path.startswith("fake:lora"):
            raise ModelLoadError(f"the fake core loads adapters named 'fake:lora...', got {path!r}")
        return Adapter(self, path)

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this model is closed; load it again")


class Adapter:
    """A LoRA adapter: it changes the logits of contexts that use it with a scale other than 0."""

    def __init__(self, model: Model, path: str) -> None:
        self.model = model
        self.metadata = {"general.type": "adapter", "general.name": path}
        self.closed = False

    def close(self) -> None:
        self.closed = True


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
            raise BadOption("this model was loaded with vocab_only=True; it has no weights to run")
        n_ctx = n_ctx or model.n_ctx_train
        _check_sizes(n_ctx, n_batch, n_ubatch, n_seq_max, threads, threads_batch, sample_threads)
        _one_of("flash_attn", flash_attn, ("auto", "on", "off"))
        _one_of("type_k", type_k, KV_TYPES)
        _one_of("type_v", type_v, KV_TYPES)
        _one_of("pooling", pooling, ("model", *_POOLINGS))
        _one_of("attention", attention, ("model", "causal", "non_causal"))
        _one_of("rope_scaling", rope_scaling, ("model", "none", "linear", "yarn", "longrope"))
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
        self.set_threads(threads, threads_batch)
        self.set_adapters(adapters or [])
        full = swa_full or model.memory_kind != "window"
        refusal = _shift_refusal(model.memory_kind, full, type_k, rope_scaling)
        layout = Layout(model.memory_kind, kv_unified, self.n_ctx_seq, n_seq_max, model.n_swa, full, refusal)
        self._memory = Memory(layout, self._check_open)

    @property
    def memory(self) -> Memory:
        self._check_open()
        return self._memory

    def close(self) -> None:
        self.closed = True

    def step(self, rows: list[Row]) -> Step:
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
            self._sample(step, i, row)
        step.sample_s = time.perf_counter() - decoded
        return step

    def logits(self, row: int) -> Logits:
        self._check_open()
        if row not in self._logits:
            raise BadOption(f"row {row} of the last step has no output; give it a sampler or output=True")
        return self._logits[row].copy()

    def embed(self, texts: list[list[int]]) -> NDArray[np.float32]:
        self._check_embed(texts)
        if self.pooling == "none":
            raise BadOption("pooling is 'none': there is one vector per token; use embed_tokens()")
        n_out = self.model.n_cls_out if self.pooling == "rank" else self.model.n_embd_out
        self.n_rows_decoded += sum(map(len, texts))
        vectors = [_vectors(tokens, n_out, self._salt).mean(axis=0) for tokens in texts]
        return np.array(vectors, dtype=np.float32).reshape(len(texts), n_out)

    def embed_tokens(self, tokens: list[int]) -> NDArray[np.float32]:
        self._check_embed([tokens])
        if self.pooling != "none":
            raise BadOption(f"pooling is {self.pooling!r}: there is one vector per text; use embed()")
        self.n_rows_decoded += len(tokens)
        return _vectors(tokens, self.model.n_embd_out, self._salt)

    def set_threads(self, threads: int, threads_batch: int) -> None:
        self._check_open()
        if threads < 0 or threads_batch < 0:
            raise BadOption(f"threads must be 0 (automatic) or more, got {threads} and {threads_batch}")
        self.threads = threads or 1
        self.threads_batch = threads_batch or self.threads

    def set_adapters(self, adapters: list[tuple[Adapter, float]]) -> None:
        self._check_open()
        for adapter, _ in adapters:
            if adapter.closed:
                raise Closed("this adapter is closed; load it again")
            if adapter.model is not self.model:
                raise BadOption("this adapter was loaded for another model")
        used = [(adapter.metadata["general.name"], scale) for adapter, scale in adapters if scale != 0]
        self._salt = int.from_bytes(hashlib.md5(repr(used).encode()).digest()[:8], "little")

    def abort(self) -> None:
        self._abort.set()

    def clear_abort(self) -> None:
        self._abort.clear()

    def synchronize(self) -> None:
        self._check_open()

    def fail_next(self, status: str) -> None:
        """Let the next step return this status and change nothing."""
        _one_of("status", status, ("no_room", "aborted", "bad_batch", "failed"))
        self._fail = status

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("this context is closed; make a new one")

    def _check_rows(self, rows: list[Row]) -> None:
        if self.model.memory_kind == "none" or self._embeddings:
            raise Unsupported("this context makes embeddings; it cannot decode. Use embed()")
        if not rows or any(not row.tokens for row in rows):
            raise BadOption("a step needs at least one row, and every row at least one token")
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
        ends: dict[int, int] = {}
        for row in rows:
            end = self._memory.pos_max(row.seq)
            if row.pos != ends.get(row.seq, 0 if end is None else end + 1):
                return "bad_batch"
            ends[row.seq] = row.pos + len(row.tokens)
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

    def _sample(self, step: Step, index: int, row: Row) -> None:
        if row.sampler is None:
            return
        try:
            token = row.sampler.choose(self._logits[index])
        except GrammarDead as error:
            step.errors[index] = str(error)
            return
        row.sampler.accept(token)
        step.tokens[index] = token
        if row.logprobs is not None:
            step.logprobs[index] = logprobs_of(self._logits[index], token, row.logprobs)

    def _check_embed(self, texts: list[list[int]]) -> None:
        self._check_open()
        if not self._embeddings:
            raise BadOption("this context does not make embeddings; make one with embeddings=True")
        for tokens in texts:
            if not 0 < len(tokens) <= self.n_batch:
                raise BadOption(f"a text to embed has 1 to {self.n_batch} tokens, got {len(tokens)}")
            for token in tokens:
                self.model._vocab.check(token)


def _parse(path: str) -> tuple[str, dict[str, int]]:
    scheme, _, rest = path.partition(":")
    kind, _, query = rest.partition("?")
    if scheme != "fake" or kind not in _KINDS:
        raise ModelLoadError(f"the fake core loads fake:{' | fake:'.join(_KINDS)}, got {path!r}")
    facts = dict(_FACTS)
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in facts or not value.isdigit():
            raise ModelLoadError(f"a fake model has no fact {name}={value!r}.{suggest(name, list(facts))}")
        facts[name] = int(value)
    if facts["n_vocab"] < MIN_VOCAB:
        raise ModelLoadError(f"n_vocab must be at least {MIN_VOCAB}, got {facts['n_vocab']}")
    return kind, facts


def _one_of(name: str, value: str, known: list[str] | tuple[str, ...]) -> None:
    if value not in known:
        raise BadOption(f"{name} must be one of {', '.join(known)}; got {value!r}.{suggest(value, list(known))}")


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
