"""Weights: an open model file, its facts and its vocabulary.

Owns the native model and the adapters that belong to it, from a checked file to `close()`. The file's keys are
validated before llama.cpp sees them, because its loader ends the process on impossible ones. Runs nothing: contexts
are the engine's and the embedder's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from kvasir import native
from kvasir.config import LoadSettings
from kvasir.model.layouts import slow_layout_hint
from kvasir.model.store import name_of
from kvasir.model.tokenizer import Tokenizer
from kvasir.native.log import start_pump

Progress = Callable[[float], bool]
"""Called with the part loaded, 0 to 1; returning False gives up."""

CHAT_TEMPLATE_KEY = "tokenizer.chat_template"

logger = logging.getLogger("kvasir")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model file says about itself.

    `memory_kind` is plain, window, recurrent, hybrid, or none for encoders. `can_shift` tells whether a
    conversation may drop its oldest part without reading the rest again. `chat_templates` maps names to
    further templates, where the file has more than one. `metadata` is every key of the file, as text.
    """

    path: Path
    description: str
    architecture: str
    file_type: str
    n_params: int
    n_bytes: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    memory_kind: str
    can_shift: bool
    has_encoder: bool
    has_decoder: bool
    chat_template: str | None
    chat_templates: Mapping[str, str]
    metadata: Mapping[str, str]


class Weights:
    """An open model file; `close()` is idempotent and frees the memory once no context uses it."""

    def __init__(self, native_model: native.Model, *, path: Path, adapters: list[tuple[native.Adapter, float]]) -> None:
        self.native = native_model
        self.path = path
        self.adapters = adapters
        self.tokenizer = Tokenizer(native_model.vocab)

    @classmethod
    def open(cls, path: Path, settings: LoadSettings, *, core: ModuleType, progress: Progress | None = None) -> Weights:
        """Check and load a file; `ModelLoadError` where it cannot be. Blocks for as long as the file takes to read."""
        start_pump(core)
        core.check_gguf(str(path))
        native_model: native.Model = core.Model.load(
            str(path),
            gpu_layers=-1 if settings.gpu_layers is None else settings.gpu_layers,
            split_mode=settings.split_mode,
            main_gpu=settings.main_gpu,
            tensor_split=list(settings.tensor_split),
            devices=list(settings.devices),
            use_mmap=settings.use_mmap,
            use_mlock=settings.use_mlock,
            vocab_only=settings.vocab_only,
            check_tensors=settings.check_tensors,
            # A callback even where nobody watches: running Python is what lets Ctrl-C end a long load.
            progress=progress if progress is not None else _go_on,
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(native_model.close)
            adapters = [(native_model.load_adapter(str(file)), scale) for file, scale in settings.adapters]
            on_failure.pop_all()
        if not settings.vocab_only:
            _warn_if_slow(core, path, native_model.file_type)
        return cls(native_model, path=path, adapters=adapters)

    def info(self) -> ModelInfo:
        """Read the facts once; they do not change."""
        model = self.native
        metadata = dict(model.metadata)
        # llama.cpp calls BERT and its kin decoders, because they run in one pass; they keep no memory to go on from.
        is_encoder = model.memory_kind == "none"
        return ModelInfo(
            path=self.path,
            description=model.description,
            architecture=model.architecture,
            file_type=model.file_type,
            n_params=model.n_params,
            n_bytes=model.n_bytes,
            n_ctx_train=model.n_ctx_train,
            n_embd=model.n_embd,
            n_layer=model.n_layer,
            n_head=model.n_head,
            n_head_kv=model.n_head_kv,
            n_vocab=model.vocab.n_tokens,
            memory_kind=model.memory_kind,
            can_shift=_can_shift(model),
            has_encoder=model.has_encoder or is_encoder,
            has_decoder=model.has_decoder and not is_encoder,
            chat_template=model.chat_template(),
            chat_templates=MappingProxyType(_named_templates(metadata)),
            metadata=MappingProxyType(metadata),
        )

    def close(self) -> None:
        """Free the adapters and the model."""
        for adapter, _ in self.adapters:
            adapter.close()
        self.native.close()


@cache  # a model that is opened again is not complained of again
def _warn_if_slow(core: ModuleType, path: Path, file_type: str) -> None:
    build = core.build_info()
    if slow_layout_hint(file_type, build) is not None:
        logger.warning("%s: %s", path.name, slow_layout_hint(file_type, build, ref=name_of(path)))


def _go_on(_part: float) -> bool:
    return True


def _can_shift(model: native.Model) -> bool:
    # Shifting turns cached keys to new positions. Recurrent state has no positions, and vision models'
    # several-axis positions cannot be turned by one number.
    return model.memory_kind in ("plain", "window") and model.rope_type not in ("mrope", "imrope", "vision")


def _named_templates(metadata: Mapping[str, str]) -> dict[str, str]:
    prefix = CHAT_TEMPLATE_KEY + "."
    return {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
