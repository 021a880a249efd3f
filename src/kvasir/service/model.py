"""The model as users hold it: generate, stream, embed, tokenize.

Owns one `Weights`, the engine that runs it and the embedder, and closes them in order: on `close()`, when the model
is collected, or when the interpreter ends. Every way to generate is one `stream()`. Any number of threads and tasks
may use one model; the engine puts them into one forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

import numpy as np

from kvasir import native
from kvasir.chat.events import ChatReply
from kvasir.chat.prompt import Template
from kvasir.config import LOAD_OPTIONS, LoadSettings, load_settings, sampling_defaults, store_settings
from kvasir.engine import Binding, Engine, EngineStats, Request
from kvasir.engine.embedder import Embedder, Normalize, Vectors
from kvasir.errors import BadOption, Closed, Unsupported
from kvasir.model.recall import Recall
from kvasir.model.sampler import Guide, build_sampler, feed, random_seed, unsteady
from kvasir.model.store import resolve
from kvasir.model.tokenizer import Prompt
from kvasir.model.weights import ModelInfo, Progress, Weights
from kvasir.service import checks, rounds
from kvasir.service.cache_view import ModelCache, OpenCache
from kvasir.service.caching import bind, cache_settings
from kvasir.service.chat import ChatOptions, ChatStream, Messages, Prepared, prepare, start
from kvasir.service.completion import Reply
from kvasir.service.options import ChatKeywords, GenerateOptions, SamplingOptions
from kvasir.service.settings import engine_settings
from kvasir.service.stream import Mailbox, Stream
from kvasir.types import SAMPLING_OPTIONS, SEED_MAX, Completion, Sampling

if TYPE_CHECKING:
    from kvasir.service.conversation import Conversation


def load(ref: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, **options: Any) -> Model:
    """Open a model: the default one, a path, or a reference such as `hf:owner/repo/file.gguf`.

    >>> with kvasir.load() as model:
    ...     print(model.generate("Once upon a time", max_tokens=32).text)

    What is not on this machine is fetched first. `options` are the load options of docs/python-api.md
    (`context_size`, `gpu_layers`, `threads`, `slots`, ...); environment and `kvasir.toml` fill in what is not given.
    `progress` is called with the part loaded, 0 to 1, and gives up by returning False. The option `observe` is a
    function that gets every event of the engine (docs/engine.md). Blocks until the model is ready. Raises
    `ModelNotFound`, `ModelLoadError`, `BadOption`, or a `StoreError` where fetching failed.
    """
    settings = load_settings(options)
    path = resolve(ref, model_dir=settings.model_dir)
    return Model.open(path, settings, progress=progress)


class Model:
    """An open model. Use it in a `with` block, call `close()`, or just let it go.

    Prompts are text or token ids; text may name special tokens (`<|im_start|>`). Options of every generating method
    are the fields of `kvasir.Sampling`, as keywords or as one `sampling` value; keywords win.
    """

    def __init__(
        self,
        core: ModuleType,
        weights: Weights,
        settings: LoadSettings,
        engine: Engine | None,
        cache: OpenCache | None,
        *,
        binding: Binding | None = None,
        owns_cache: bool = True,
        first: Model | None = None,
    ) -> None:
        self._core = core
        self._settings = settings
        self._cache = cache
        self._binding = binding
        self._weights = weights
        self._engine = engine
        self._holds: object = first  # whoever owns what this uses: it must not be collected before
        self._embedder = Embedder(core, weights.native, engine_settings(settings, weights.adapters))
        self._defaults = sampling_defaults()
        self._info = weights.info()
        self._recall = Recall(weights.tokenizer)
        self._templates: dict[str, Template] = {}  # by their source; "" is the model's own
        self._stop_tokens = frozenset(weights.native.vocab.eog_tokens)
        # Also at the interpreter's end, so that a script that closes nothing still ends cleanly.
        owned = weights if first is None else None
        self._finalizer = weakref.finalize(self, _shut, engine, self._embedder, owned, cache if owns_cache else None)

    @classmethod
    def open(
        cls,
        path: Path,
        settings: LoadSettings,
        *,
        core: ModuleType = native,
        progress: Progress | None = None,
        cache: OpenCache | None = None,
    ) -> Model:
        """Open a file with settings already made; `core` replaces the native core, as tests do.

        `cache` is one that several models share and that outlives them; without it the model opens its own.
        """
        with contextlib.ExitStack() as on_failure:
            weights = Weights.open(path, settings, core=core, progress=progress)
            on_failure.callback(weights.close)
            engine = used = binding = None
            if not settings.vocab_only and _why_silent(weights) is None:
                if settings.cache and path.is_file():
                    store = store_settings()
                    used = cache if cache is not None else OpenCache.open(cache_settings(settings, store))
                    if cache is None:
                        on_failure.callback(used.close)
                    binding = bind(used.cache, weights, settings, store, core=core)
                engine = Engine.open(
                    weights.native, engine_settings(settings, weights.adapters), core=core, cache=binding
                )
                on_failure.callback(engine.close)
            model = cls(core, weights, settings, engine, used, binding=binding, owns_cache=cache is None)
            on_failure.pop_all()
        return model

    def _twin(self) -> Model:
        """Return another engine over these weights and this cache, which stay this model's: close it before this."""
        self._running_engine()
        settings = engine_settings(self._settings, self._weights.adapters)
        engine = Engine.open(self._weights.native, settings, core=self._core, cache=self._binding)
        return Model(
            self._core,
            self._weights,
            self._settings,
            engine,
            self._cache,
            binding=self._binding,
            owns_cache=False,
            first=self,
        )

    @property
    def info(self) -> ModelInfo:
        """The facts of the model file."""
        return self._info

    @property
    def cache(self) -> ModelCache:
        """What the model has kept of prompts and replies: look at it, warm it, make it smaller.

        Raises `Unsupported` where there is none: with `cache=False`, `vocab_only=True`, and on encoders.
        """
        self._check_open()
        if self._cache is None:
            why = _why_silent(self._weights) or "it was loaded with cache=False or vocab_only=True"
            raise _unsupported("use the cache", why)
        return ModelCache(self._cache, self)

    @property
    def limit(self) -> int:
        """Tokens one request may have, prompt and completion together."""
        return self._running_engine().limit

    def conversation(
        self,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        resume: str | os.PathLike[str] | None = None,
        evict: str = "oldest",
        scope: str | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> Conversation:
        """Begin a chat that stays in memory, so that each turn costs only its own tokens.

        `system` is its system prompt, `messages` what was said before, `resume` a file that `save()` wrote. `evict`
        says what happens when it outgrows the context: "oldest" turns are given up, cheaply; "reprefill" the same but
        exactly; "refuse" raises `ContextFull`. The other options are those of `chat()`.
        """
        from kvasir.service.conversation import Conversation

        chosen, rest = ChatOptions.split(options)
        given = [{"role": "system", "content": system}, *messages] if system is not None else list(messages)
        talk = Conversation(
            self, given, options=chosen, sampling=self._sampling(sampling, rest), evict=evict, scope=scope
        )
        if resume is not None:
            talk.resume(resume)
        return talk

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache: bool = True,
        scope: str | None = None,
        parent_key: str | None = None,
        resumed_tokens: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Start generating and return at once; the `Stream` gives out text as it comes.

        Higher `priority` goes first. After `deadline` seconds the request fails with `DeadlineExceeded`. Prefixes that
        are already computed are reused, within one `scope` only; `cache=False` reuses none and leaves none behind.
        `parent_key`, the `Completion.key` of the turn this one continues, spares the search for it.
        `resumed_tokens` says that so many tokens at the end of the prompt were generated by this request before it was
        interrupted: with its seed, it goes on with the tokens it would have made.
        Raises what can be known now: bad options, an empty or too long prompt, a full queue.
        """
        self._check_open()
        chosen = self._sampling(sampling, options)
        tokens = self._encode(prompt, scope)
        request, reply = self._request(
            tokens,
            chosen,
            n_resumed=_resumed(resumed_tokens, len(tokens)),
            remember=self._remembering(prompt, tokens, scope) if cache else None,
            **self._queued(priority=priority, deadline=deadline, cache=cache, scope=scope, parent_key=parent_key),
        )
        return self._submit(request, reply)

    def _request(
        self,
        tokens: list[int],
        sampling: Sampling,
        *,
        n_resumed: int = 0,
        remember: Callable[[str, list[int]], None] | None = None,
        guide: Guide | None = None,
        stops: tuple[str, ...] = (),
        shown: frozenset[int] = frozenset(),
        **options: Any,
    ) -> tuple[Request, Reply]:
        """Return what the engine is sent and what takes its answer; `options` are fields of `Request`."""
        engine = self._running_engine()
        vocab = self._weights.native.vocab
        sampler, seed = build_sampler(self._core, vocab, sampling, n_ctx=engine.limit, guide=guide)
        feed(sampler, tokens, n_resumed=n_resumed)
        request = Request(
            tokens=tuple(tokens),
            sampling=sampling,
            sampler=sampler,
            stop_tokens=frozenset() if sampling.ignore_eos else self._stop_tokens,
            max_tokens=sampling.max_tokens,
            **options,
        )
        fresh = unsteady(sampler) if n_resumed else ()
        return request, Reply(
            self._weights.tokenizer,
            sampling,
            seed=seed,
            remember=remember,
            fresh_samplers=fresh,
            stops=stops,
            shown=shown,
        )

    @staticmethod
    def _queued(*, priority: object, deadline: object, parent_key: object, **options: Any) -> dict[str, Any]:
        """Check how a request is queued; return fields of `Request`."""
        return {
            "priority": checks.whole("priority", priority),
            "deadline_s": checks.seconds("deadline", deadline),
            "parent_key": checks.key(parent_key),
            **options,
        }

    def read(self, prompt: Prompt, *, priority: int = 0, scope: str | None = None) -> Stream:
        """Read a prompt into memory without writing anything: what continues it soon costs only its own tokens.

        Returns at once. `result()`, or `await`, waits until it is read and returns a completion without text, whose
        `usage` tells what had to be computed.
        """
        return self._read(self._encode(prompt, scope), priority=checks.whole("priority", priority), scope=scope)

    def _read(
        self, tokens: list[int], *, priority: int = 0, scope: str | None = None, owner: str | None = None
    ) -> Stream:
        nothing = Sampling(max_tokens=1, seed=0)
        request = Request(
            tokens=tuple(tokens),
            sampling=nothing,
            sampler=None,
            stop_tokens=frozenset(),
            max_tokens=0,
            priority=priority,
            scope=scope,
            owner=owner,
        )
        return self._submit(request, Reply(self._weights.tokenizer, nothing, seed=0))

    def _shift(self, owner: str, tokens: list[int], start: int, end: int, *, scope: str | None) -> bool:
        """Cut tokens out of what is in memory, for one owner; False where they have to be read again."""
        engine = self._running_engine()
        if engine.shift(owner, tokens, start, end, scope=scope).result():
            return True
        if not engine.can_shift:
            return False
        self._read(tokens, scope=scope, owner=owner).result()  # it had to yield its slot: back from the cache
        return engine.shift(owner, tokens, start, end, scope=scope).result()

    def _submit(self, request: Request, reply: Reply) -> Stream:
        engine, mail = self._running_engine(), Mailbox()
        request_id = engine.submit(request, mail)
        return Stream(reply, mail, cancel=partial(engine.cancel, request_id), owner=self)

    @overload
    def generate(self, prompt: Prompt, *, n: None = None, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | list[Completion]:
        """Generate and return the whole completion. Ctrl-C stops the work and leaves the model usable.

        Takes the options of `stream`. With `n`, returns a list of that many: the prompt is read once, and completion i
        has seed + i.
        """
        if n is None:
            return self.stream(prompt, **options).result()
        with contextlib.ExitStack() as all_or_none:
            streams = [all_or_none.enter_context(stream) for stream in self._several(prompt, n, options)]
            return [stream.result() for stream in streams]

    @overload
    async def agenerate(self, prompt: Prompt, *, n: None = None, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    async def agenerate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Completion]: ...
    async def agenerate(
        self, prompt: Prompt, *, n: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion | list[Completion]:
        """Generate in asyncio, like `generate`; a cancelled task cancels the work."""
        if n is None:
            return await self.stream(prompt, **options)
        with contextlib.ExitStack() as all_or_none:
            streams = [all_or_none.enter_context(stream) for stream in self._several(prompt, n, options)]
            return [await stream for stream in streams]

    def _several(self, prompt: Prompt, n: int, options: GenerateOptions) -> Iterator[Stream]:
        """Start n requests that differ in their seed alone."""
        checks.whole("n", n, least=1)
        given = options.get("seed")
        sampling = options.get("sampling")
        seed = given if given is not None else sampling.seed if sampling is not None else None
        first = seed if seed is not None else random_seed()
        for i in range(n):
            each: GenerateOptions = {**options, "seed": (first + i) % (SEED_MAX + 1)}
            yield self.stream(prompt, **each)

    def chat_stream(
        self,
        messages: Messages,
        *,
        sampling: Sampling | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache: bool = True,
        scope: str | None = None,
        parent_key: str | None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatStream:
        """Start a reply to messages and return at once; the `ChatStream` gives out events as they come.

        Messages are dicts in OpenAI's shape, or one text of the user. Options are those of `ChatOptions`
        (`tools`, `enable_thinking`, `regex`, ...) and those of `stream`.
        """
        self._check_open()
        chosen, rest = ChatOptions.split(options)
        prepared = prepare(self, messages, chosen, scope=scope)
        return start(
            self,
            prepared,
            chosen,
            self._sampling(sampling, rest),
            priority=priority,
            deadline=deadline,
            cache=cache,
            scope=scope,
            parent_key=parent_key,
        )

    def chat(self, messages: Messages, **options: Any) -> ChatReply:
        """Reply to messages and return the whole reply. Takes the options of `chat_stream`.

        >>> model.chat("Name a river.").content
        """
        return self.chat_stream(messages, **options).result()

    async def achat(self, messages: Messages, **options: Any) -> ChatReply:
        """`chat` in asyncio; a cancelled task cancels the work."""
        return await self.chat_stream(messages, **options)

    def run_tools(self, messages: Messages, tools: Sequence[Any], *, max_rounds: int = 8, **options: Any) -> ChatReply:
        """Reply with the help of Python functions: call what the model asks for, tell it the results, and go on.

        Returns the reply that asks for nothing more, with the whole exchange as `messages`. What a tool raises is told
        to the model. After `max_rounds` rounds of calls the model must answer with what it knows by then. A reply that
        calls a tool which is only described is returned as it is, with `finish_reason` "tool_calls". `tool_choice`
        counts for the first round.
        """
        return rounds.run(self, messages, tools, max_rounds=max_rounds, options=options)

    async def arun_tools(
        self, messages: Messages, tools: Sequence[Any], *, max_rounds: int = 8, **options: Any
    ) -> ChatReply:
        """`run_tools` in asyncio: async functions are awaited, others run in threads, those of one round together."""
        return await rounds.arun(self, messages, tools, max_rounds=max_rounds, options=options)

    def render(self, messages: Messages, *, tools: Sequence[Any] | None = None, **options: Any) -> str:
        """Return the text that `chat` would continue. Options are those of `ChatOptions`."""
        return self._prepared(messages, tools, options).text

    def count_tokens(self, messages: Messages, *, tools: Sequence[Any] | None = None, **options: Any) -> int:
        """Return how many tokens a prompt of these messages has. Options are those of `ChatOptions`."""
        return len(self._prepared(messages, tools, options).tokens)

    def _prepared(self, messages: Messages, tools: Sequence[Any] | None, options: dict[str, Any]) -> Prepared:
        self._check_open()
        return prepare(self, messages, ChatOptions.of(tools=tools, **options))

    def embed(self, texts: str | Sequence[str], *, normalize: Normalize = "l2") -> Vectors:
        """Return float32 vectors: `(n,)` for one text, `(len(texts), n)` for a list.

        `normalize`: "l2" gives vectors of length 1, "max" a largest element of 1, None what the model gives.
        """
        self._check_open()
        if self._weights.native.vocab_only:
            raise _unsupported("embed", "it was loaded with vocab_only=True and has no weights")
        if isinstance(texts, str | bytes):
            (vector,) = self.embed([texts], normalize=normalize)
            return cast(Vectors, vector)
        tokens = [self._embeddable(text) for text in _texts(texts)]
        if not tokens:
            return np.empty((0, self._weights.native.n_embd_out), dtype=np.float32)
        return self._embedder.embed(tokens, normalize=normalize)

    async def aembed(self, texts: str | Sequence[str], *, normalize: Normalize = "l2") -> Vectors:
        """`embed` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(self.embed, texts, normalize=normalize)

    def rerank(self, query: str, documents: Sequence[str]) -> Vectors:
        """Return one score per document, `(len(documents),)`: how well it answers the query. Higher is better.

        Needs a reranking model, which has a ranking head; others raise `Unsupported`.
        """
        self._check_open()
        if self._weights.native.vocab_only:
            raise _unsupported("rank", "it was loaded with vocab_only=True and has no weights")
        pairs = [self._weights.tokenizer.encode_pair(query, document) for document in _texts(documents)]
        if not pairs:
            return np.empty(0, dtype=np.float32)
        return self._embedder.rank(pairs)

    async def arerank(self, query: str, documents: Sequence[str]) -> Vectors:
        """`rerank` in asyncio; the work runs in a thread."""
        return await asyncio.to_thread(self.rerank, query, documents)

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Turn text into token ids, as `generate` does with a prompt.

        `add_special` adds what the model wants at the beginning or end; `parse_special` reads the names of special
        tokens in the text as those tokens: turn it off for text you do not trust.
        """
        self._check_open()
        return self._weights.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Turn token ids into text; `special` shows special tokens by their names."""
        self._check_open()
        return self._weights.tokenizer.decode(tokens, special=special)

    def stats(self) -> EngineStats:
        """Return what the engine counted: slots, queue, cells, reuse, and where a tick's time goes."""
        return self._running_engine().stats()

    @property
    def closed(self) -> bool:
        """Whether the model was closed; only `info` can then be read."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop all work and free the memory; streams still open end in `EngineStopped`. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}kvasir.Model {self._info.description!r} from {self._info.path}>"

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the model is closed; load it again.")

    def _running_engine(self) -> Engine:
        self._check_open()
        if self._engine is None:
            why = _why_silent(self._weights) or "it was loaded with vocab_only=True and has no weights"
            raise _unsupported("generate text", why)
        return self._engine

    def _sampling(self, base: Sampling | None, options: SamplingOptions) -> Sampling:
        for name in options:
            if name not in SAMPLING_OPTIONS and name in LOAD_OPTIONS:
                raise BadOption(f"{name!r} is a load option; give it to kvasir.load().")
        return Sampling.of(base if base is not None else self._defaults, **options)

    def _encode(self, prompt: Prompt, scope: str | None) -> list[int]:
        """Tokenize a prompt; a text that this model wrote itself becomes the tokens it wrote."""
        if isinstance(prompt, str):
            return self._recall.encode(prompt, scope=scope)
        return self._weights.tokenizer.encode_prompt(prompt)

    def _remembering(
        self, prompt: Prompt, tokens: list[int], scope: str | None
    ) -> Callable[[str, list[int]], None] | None:
        """Return what notes a finished reply, so that prompt and reply sent back as text are its tokens again."""
        if not isinstance(prompt, str):
            return None
        recall = self._recall
        return lambda text, made: recall.remember(prompt + text, [*tokens, *made], scope=scope)

    def _embeddable(self, text: str) -> list[int]:
        tokens = self._weights.tokenizer.encode(text)
        if not tokens:
            raise BadOption("a text to embed is empty; give at least one character.")
        return tokens


def _resumed(value: object, n_prompt: int) -> int:
    n_tokens = checks.whole("resumed_tokens", value)
    if not 0 <= n_tokens < n_prompt:
        raise BadOption(f"resumed_tokens must be 0 to {n_prompt - 1}, less than the prompt has tokens, got {n_tokens}.")
    return n_tokens


def _texts(texts: Sequence[str]) -> Sequence[str]:
    try:
        return list(texts)
    except TypeError:
        raise BadOption(f"embed takes a text or a list of texts, got {type(texts).__name__}.") from None


def _why_silent(weights: Weights) -> str | None:
    """Why this model cannot continue a text; None where it can."""
    model = weights.native
    if not model.has_decoder or model.memory_kind == "none":
        return "it is an encoder, made for embeddings; use embed()"
    if model.has_encoder:
        return "it is an encoder-decoder model, and only decoder models are run"
    if model.is_diffusion:
        return "it is a diffusion model, which does not write from left to right"
    return None


def _unsupported(what: str, why: str) -> Unsupported:
    return Unsupported(f"this model cannot {what}: {why}.", what=what, why=why)


def _shut(engine: Engine | None, embedder: Embedder, weights: Weights | None, cache: OpenCache | None) -> None:
    """Close in order: the engine saves what lives into the cache, and whoever uses the weights goes before them.

    What is None is somebody else's to close.
    """
    if engine is not None:
        engine.close()
    if cache is not None:
        cache.close()
    embedder.close()
    if weights is not None:
        weights.close()
