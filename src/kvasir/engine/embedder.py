"""Embeddings and rank scores, in a context of their own.

Owns that context, made on first use and again when a longer text comes. Callable from any thread, one at a time. Has
nothing to do with the loop: an embedding context keeps no sequence between calls, so there is nothing to schedule.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.core import Core
from kvasir.engine.settings import EngineSettings, default_threads
from kvasir.errors import BadOption, Closed, PromptTooLong, Unsupported

Vectors: TypeAlias = NDArray[np.float32]
Normalize: TypeAlias = Literal["l2", "max"] | None

# Tokens of one decode to begin with. Its buffers grow with the square of this, and most texts are shorter.
FIRST_TOKENS = 2048
# Texts of one decode. Beyond this the gain per text is lost in the noise and the batch is full anyway.
MAX_TEXTS = 64


class Embedder:
    """Turns lists of tokens into vectors or scores, many per decode."""

    def __init__(self, core: Core, model: Any, settings: EngineSettings) -> None:
        self._core = core
        self._model = model
        self._settings = settings
        self._lock = threading.Lock()
        self._context: Any = None
        self._closed = False

    def embed(self, texts: list[list[int]], *, normalize: Normalize = "l2") -> Vectors:
        """Return one vector per text, (n, n_embd). Blocks; releases the GIL."""
        with self._lock:
            context = self._ready(texts)
            if context.pooling == "rank":
                why = "it is a reranker, which scores texts"
                raise Unsupported(f"this model cannot embed: {why}. Use rank().", what="embed", why=why)
            vectors: Vectors = context.embed(texts)
        return normalized(vectors, normalize)

    def rank(self, texts: list[list[int]]) -> NDArray[np.float32]:
        """Return one score per text, (n,): how well the document in it answers the query in it. Higher is better."""
        with self._lock:
            context = self._ready(texts)
            if context.pooling != "rank":
                why = "it has no ranking head"
                raise Unsupported(f"this model cannot rank: {why}. Load a reranker.", what="rank", why=why)
            scores: Vectors = context.embed(texts)
        return scores[:, 0]

    def close(self) -> None:
        """Free the context. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    def _ready(self, texts: list[list[int]]) -> Any:
        """Return a context in which the longest of these texts fits."""
        longest = max((len(tokens) for tokens in texts), default=1)
        self._check(texts, longest)
        if self._closed:
            raise Closed("the embedder is closed; load the model again.")
        if self._context is None or self._context.n_batch < longest:
            self._drop()
            self._context = self._open(longest)
        return self._context

    def _open(self, longest: int) -> Any:
        context = self._make("model", longest)
        if context.pooling != "none":
            return context
        # A generative model names no pooling and would give no vector for a text; the mean is the usual choice.
        context.close()
        return self._make("mean", longest)

    def _make(self, pooling: str, longest: int) -> Any:
        n_tokens = min(max(longest, FIRST_TOKENS), self._limit())
        threads = self._settings.threads or default_threads()
        return self._core.Context(
            self._model,
            n_ctx=n_tokens,
            n_batch=n_tokens,
            n_ubatch=n_tokens,  # an encoder sees the whole text at once
            n_seq_max=min(MAX_TEXTS, n_tokens),
            kv_unified=True,
            embeddings=True,
            pooling=pooling,
            **{"threads": threads, "threads_batch": threads, **self._settings.context},
        )

    def _check(self, texts: list[list[int]], longest: int) -> None:
        if not all(texts):
            raise BadOption("a text to embed is empty; give each at least one token.")
        if longest > (limit := self._limit()):
            raise PromptTooLong(
                f"a text is {longest:,} tokens; this model embeds at most {limit:,}. Split it.",
                n_tokens=longest,
                limit=limit,
            )

    def _limit(self) -> int:
        return self._model.n_ctx_train or FIRST_TOKENS

    def _drop(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


def normalized(vectors: Vectors, how: Normalize) -> Vectors:
    """Scale each vector to length 1 ("l2"), to a largest value of 1 ("max"), or not at all (None)."""
    if how is None:
        return vectors
    if how == "l2":
        scale = np.linalg.norm(vectors, axis=-1, keepdims=True)
    elif how == "max":
        scale = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    else:
        raise BadOption(f"normalize must be 'l2', 'max' or None, got {how!r}.")
    result: Vectors = (vectors / np.where(scale > 0, scale, 1)).astype(np.float32)
    return result
