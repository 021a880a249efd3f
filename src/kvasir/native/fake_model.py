"""The fake core's models: kinds and facts, and no weights.

Owns the names that load ("fake:plain?n_ctx_train=512&n_vocab=300") and what such a model says of itself.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl

from kvasir.errors import BadOption, Closed, ModelLoadError, suggest
from kvasir.native.fake_vocab import MIN_VOCAB, Vocab

_KINDS = {"plain": "plain", "window": "window", "recurrent": "recurrent", "hybrid": "hybrid", "embed": "none",
          "rank": "none"}  # fmt: skip
_FACTS = {"n_ctx_train": 2048, "n_vocab": MIN_VOCAB, "n_embd": 32, "window": 32, "ctx_pad": 1, "add_bos": 0,
          "eog_every": 64, "template": 1}  # fmt: skip
TEMPLATE = r"""
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- if tools or first %}
    {{- '<|im_start|>system\n' + (first.content if first else '') }}
    {%- if tools %}
        {{- ('\n\n' if first else '') + '# Tools\n\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
        {{- '\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and first) %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
logs: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()


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
        # llama.cpp means encoder-decoder models such as T5; BERT, which only encodes, says the same as here.
        self.has_encoder, self.has_decoder = False, True
        self.pooling = {"embed": "mean", "rank": "rank"}.get(kind, "none")
        self.n_ctx_train, self.n_embd, self.n_embd_out = facts["n_ctx_train"], facts["n_embd"], facts["n_embd"]
        self.n_swa = facts["window"] if kind == "window" else 0
        self.n_cls_out = 1
        self._metadata = {"general.architecture": "fake", "general.name": kind}
        if facts["template"]:
            self._metadata["tokenizer.chat_template"] = TEMPLATE
        self._vocab = Vocab(facts["n_vocab"], add_bos=bool(facts["add_bos"]))

    @staticmethod
    def load(
        path: str, *, gpu_layers: int = -1, split_mode: str = "layer", main_gpu: int = 0,
        tensor_split: list[float] | None = None, devices: list[str] | None = None, use_mmap: bool = True,
        use_mlock: bool = False, vocab_only: bool = False, check_tensors: bool = False,
        progress: Callable[[float], bool] | None = None,
    ) -> Model:  # fmt: skip
        """Load a fake model. The other options are checked and change nothing."""
        kind, facts = parse(path)
        one_of("split_mode", split_mode, ("none", "layer", "row"))
        for name in devices or []:
            one_of("device", name, ("FAKE", "none"))
        for done in (0.0, 0.5, 1.0):
            if progress is not None and not progress(done):
                raise ModelLoadError(f"loading {path} was stopped by the progress callback")
        logs.put((20, f"loaded {path}"))
        return Model(kind, facts, vocab_only=vocab_only)

    @property
    def vocab(self) -> Vocab:
        """The vocabulary; it may outlive the model."""
        self._check_open()
        return self._vocab

    @property
    def metadata(self) -> dict[str, str]:
        """The GGUF keys such a model would have."""
        self._check_open()
        return dict(self._metadata)

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the template; None for any name, and for a model without one ("fake:plain?template=0")."""
        self._check_open()
        return TEMPLATE if name is None and self.facts["template"] else None

    def load_adapter(self, path: str) -> Adapter:
        """Load an adapter named "fake:lora..."; `ModelLoadError` otherwise."""
        self._check_open()
        if not path.startswith("fake:lora"):
            raise ModelLoadError(f"the fake core loads adapters named 'fake:lora...', got {path!r}")
        return Adapter(self, path)

    def close(self) -> None:
        """Close; idempotent. Contexts and vocabularies made before go on."""
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
        """Close; idempotent. Contexts that use it go on."""
        self.closed = True


def parse(path: str) -> tuple[str, dict[str, int]]:
    """Return the kind and the facts a path names; `ModelLoadError` when it names none."""
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


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise `BadOption` unless the value is a known one."""
    if value not in known:
        raise BadOption(f"{name} must be one of {', '.join(known)}; got {value!r}.{suggest(value, list(known))}")
