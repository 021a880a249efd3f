"""Spoiled copies of the tiny models, and a child process that tries each: `-m tests.native.mutations ARCH DIR FIRST`.

Owns the list of what can be wrong with a well-formed GGUF: every key missing, of another type, zero, huge or of the
wrong length; tensors missing, misshapen or of another type; bytes of the header flipped. The child prints a line before
and after each attempt, so that a death names the file that caused it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.gguf_writer import GGUFValue

from kvasir import native
from kvasir.errors import KvasirError, ModelLoadError
from tests.models import write_model

Edit = Callable[[gguf.GGUFWriter], None]
Mutation = tuple[str, Edit | None, Callable[[bytearray], None] | None]

_VALUES: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {
    "zero": (0, GGUFValueType.UINT32, None),
    "one": (1, GGUFValueType.UINT32, None),
    "huge": (0xFFFFFFFF, GGUFValueType.UINT32, None),
    "large": (1 << 30, GGUFValueType.UINT32, None),
    "negative": (-1, GGUFValueType.INT32, None),
    "wide": (1 << 62, GGUFValueType.UINT64, None),
    "float": (0.5, GGUFValueType.FLOAT32, None),
    "nan": (float("nan"), GGUFValueType.FLOAT32, None),
    "infinite": (float("inf"), GGUFValueType.FLOAT32, None),
    "empty text": ("", GGUFValueType.STRING, None),
    "text": ("nonsense", GGUFValueType.STRING, None),
    "bool": (True, GGUFValueType.BOOL, None),
    "short list": ([1], GGUFValueType.ARRAY, GGUFValueType.UINT32),
    "long list": ([7] * 600, GGUFValueType.ARRAY, GGUFValueType.UINT32),
    "list of texts": (["a", "b"], GGUFValueType.ARRAY, GGUFValueType.STRING),
}
# Keys that llama.cpp reads when they are there.
_EXTRA = [
    "expert_count", "expert_used_count", "expert_group_count", "nextn_predict_layers", "rope.scaling.type",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.causal", "pooling_type",
    "attention.head_count_kv", "vocab_size", "embedding_length_out", "logit_scale", "rope.dimension_sections",
]  # fmt: skip
_HEADER_BYTES = 6000
_N_FLIPS = 150


def mutations(arch: str, keys: list[str], tensors: list[str]) -> Iterator[Mutation]:
    """Yield every mutation of this architecture's model, with a name that tells what was done."""
    for key in sorted({*keys, *(f"{arch}.{name}" for name in _EXTRA)}):
        yield f"{key} missing", _without_key(key), None
        for name, value in _VALUES.items():
            yield f"{key} {name}", _with_key(key, GGUFValue(*value)), None
    for key in keys:
        yield f"{key} halved", _halved(key), None
        yield f"{key} repeated", _repeated(key), None
    for tensor in tensors:
        for name, edit in _TENSOR_EDITS.items():
            yield f"{tensor} {name}", _with_tensor(tensor, edit), None
    for seed in range(_N_FLIPS):
        yield f"flipped {seed}", None, _flipped(seed)


def _without_key(key: str) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)

    return edit


def _with_key(key: str, value: GGUFValue) -> Edit:
    return lambda writer: writer.kv_data[0].update({key: value})


def _change_list(key: str, change: Callable[[Any], Any]) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        old = writer.kv_data[0][key]
        if old.type == GGUFValueType.ARRAY:
            writer.kv_data[0][key] = GGUFValue(change(list(old.value)), old.type, old.sub_type)

    return edit


def _halved(key: str) -> Edit:
    return _change_list(key, lambda values: values[: len(values) // 2 or 1])


def _repeated(key: str) -> Edit:
    return _change_list(key, lambda values: [values[0]] * len(values))


def _shrink(tensor: Any) -> None:
    tensor.shape = [max(1, tensor.shape[0] // 2), *tensor.shape[1:]]


def _flatten(tensor: Any) -> None:
    tensor.shape = [tensor.nbytes // 4]


def _empty(tensor: Any) -> None:
    tensor.shape = [0, *tensor.shape[1:]]


def _overflow(tensor: Any) -> None:
    tensor.shape = [1 << 40, *tensor.shape[1:]]


def _retype(dtype: GGMLQuantizationType) -> Callable[[Any], None]:
    def edit(tensor: Any) -> None:
        tensor.dtype = dtype

    return edit


_TENSOR_EDITS: dict[str, Callable[[Any], None] | None] = {
    "missing": None, "shrunk": _shrink, "flattened": _flatten, "empty": _empty, "overflowing": _overflow,
    "i32": _retype(GGMLQuantizationType.I32), "f16": _retype(GGMLQuantizationType.F16),
    "q8_0": _retype(GGMLQuantizationType.Q8_0), "f64": _retype(GGMLQuantizationType.F64),
}  # fmt: skip


def _with_tensor(name: str, change: Callable[[Any], None] | None) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        if change is None:
            del writer.tensors[0][name]
        else:
            change(writer.tensors[0][name])

    return edit


def _flipped(seed: int) -> Callable[[bytearray], None]:
    def flip(data: bytearray) -> None:
        source = random.Random(seed)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(8, min(_HEADER_BYTES, len(data)))] = source.randrange(256)

    return flip


def attempt(path: Path) -> str:
    """Load a file and, if it loads, use it as far as it goes. Anything but a `KvasirError` is a fault."""
    try:
        model = native.Model.load(str(path), use_mmap=False)
    except ModelLoadError:
        return "refused"
    try:
        _use(model)
    except KvasirError as error:
        return f"loaded, then {type(error).__name__}"
    return "loaded"


def _use(model: Any) -> None:
    tokens = model.vocab.tokenize("hello")[:8] or [0]
    if model.memory_kind == "none":
        native.Context(model, n_ctx=256, embeddings=True, threads=1).embed([tokens])
    else:
        native.Context(model, n_ctx=256, threads=1).step([native.Row(0, 0, tokens, output=True)])


def main(arch: str, folder: Path, first: int) -> None:
    """Try every mutation from number `first` on."""
    seen: list[gguf.GGUFWriter] = []
    path = write_model(arch, folder / "model.gguf", edit=seen.append)
    keys, tensors = list(seen[0].kv_data[0]), list(seen[0].tensors[0])
    for i, (name, edit, damage) in enumerate(mutations(arch, keys, tensors)):
        if i < first:
            continue
        print(f"try {i} {name}", flush=True)
        write_model(arch, path, edit=edit)
        if damage is not None:
            data = bytearray(path.read_bytes())
            damage(data)
            path.write_bytes(data)
        print(f"got {attempt(path)}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
