"""Embeddings and rank scores, in a context of their own.

Owns that context, made on first use and again when a longer text comes, and the queue before it. Callable from any
thread: one decodes at a time, and takes along the texts of all who wait. Has nothing to do with the loop: an embedding
context keeps no sequence between calls, so there is nothing to schedule.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class _Job:
    """The texts of one caller, and what came of them: values or an error, or nothing yet."""

    texts: list[list[int]]
    ranks: bool
    values: Vectors | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.values is not None or self.error is not None

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.texts))


class Embedder:
    """Turns lists of tokens into vectors or scores, many per decode."""

    def __init__(self, core: Core, model: Any, settings: EngineSettings) -> None:
        self._core = core
        self._model = model
        self._settings = settings
        self._turn = threading.Condition()  # guards what follows, except that who is busy owns the context
        self._waiting: deque[_Job] = deque()
        self._busy = False  # whether somebody decodes now
        self._closed = False
        self._context: Any = None

    def embed(self, texts: list[list[int]], *, normalize: Normalize = "l2") -> Vectors:
        """Return one vector per text, (n, n_embd). Blocks; releases the GIL."""
        return normalized(self._values(_Job(texts, ranks=False)), normalize)

    def rank(self, texts: list[list[int]]) -> NDArray[np.float32]:
        """Return one score per text, (n,): how well the document in it answers the query in it. Higher is better."""
        return self._values(_Job(texts, ranks=True))[:, 0]

    def close(self) -> None:
        """Free the context, after the decode that runs; who waits gets `Closed`. Idempotent."""
        with self._turn:
            self._closed = True
            self._turn.wait_for(lambda: not self._busy)
            self._drop()

    def _values(self, job: _Job) -> Vectors:
        """Wait until the job is done, or do it: the first who waits works for all."""
        self._check(job.texts)
        with self._turn:
            self._waiting.append(job)
        try:
            while not job.is_done:
                self._take_turn(job)
        except BaseException:  # Ctrl-C: nobody wants it any more
            with self._turn:
                if job in self._waiting:
                    self._waiting.remove(job)
            raise
        if job.error is not None:
            raise job.error
        assert job.values is not None
        return job.values

    def _take_turn(self, job: _Job) -> None:
        """Let somebody else do the job, or do as many as fill a decode."""
        with self._turn:
            self._turn.wait_for(lambda: job.is_done or not self._busy)
            if job.is_done:
                return
            self._busy = True
            jobs = self._next_jobs()
        try:
            self._run(jobs)
        finally:
            with self._turn:
                self._waiting.extendleft(left for left in reversed(jobs) if not left.is_done)  # after Ctrl-C only
                self._busy = False
                self._turn.notify_all()

    def _next_jobs(self) -> list[_Job]:
        """Take the oldest jobs, as many as fill one decode; a larger one alone."""
        n_most = self._context.n_batch if self._context is not None else min(FIRST_TOKENS, self._limit())
        jobs = [self._waiting.popleft()]
        n_texts, n_tokens = len(jobs[0].texts), jobs[0].n_tokens
        while self._waiting:
            n_texts, n_tokens = n_texts + len(self._waiting[0].texts), n_tokens + self._waiting[0].n_tokens
            if n_texts > MAX_TEXTS or n_tokens > n_most:
                break
            jobs.append(self._waiting.popleft())
        return jobs

    def _run(self, jobs: list[_Job]) -> None:
        """Decode the texts of these jobs together; where that fails, each alone, so that none fails for another."""
        texts = [text for job in jobs for text in job.texts]
        try:
            context = self._ready(texts)
            for job in jobs:
                _check_kind(context.pooling, ranks=job.ranks)
            values: Vectors = context.embed(texts)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].error = error
            else:
                for job in jobs:
                    self._run([job])
            return
        ends = np.cumsum([len(job.texts) for job in jobs])
        for job, part in zip(jobs, np.split(values, ends[:-1]), strict=True):
            job.values = part

    def _ready(self, texts: list[list[int]]) -> Any:
        """Return a context in which the longest of these texts fits."""
        longest = max((len(tokens) for tokens in texts), default=1)
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
            poll=1,  # as the engine's own: threads that spin between two decodes take the cores from everybody else
            **{"threads": threads, "threads_batch": threads, **self._settings.context},
        )

    def _check(self, texts: list[list[int]]) -> None:
        if not all(texts):
            raise BadOption("a text to embed is empty; give each at least one token.")
        longest = max(map(len, texts), default=0)
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


def _check_kind(pooling: str, *, ranks: bool) -> None:
    if ranks and pooling != "rank":
        why = "it has no ranking head"
        raise Unsupported(f"this model cannot rank: {why}. Load a reranker.", what="rank", why=why)
    if not ranks and pooling == "rank":
        why = "it is a reranker, which scores texts"
        raise Unsupported(f"this model cannot embed: {why}. Use rerank().", what="embed", why=why)


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
