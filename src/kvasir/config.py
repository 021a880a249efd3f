"""Settings: frozen values, and the one reader of environment and `kvasir.toml`.

Arguments beat `KVASIR_*` variables beat `kvasir.toml` beat defaults; `GGML_N_GPU_LAYERS` alone beats the argument.
A settings value that exists is valid. Unknown names are errors with a suggestion. Opens no model and makes no folder;
whoever needs the environment gets it from here, as a value.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvasir.errors import BadOption, suggest
from kvasir.types import INT32_MAX, SAMPLING_OPTIONS, Sampling

TOML_NAME = "kvasir.toml"
ALIASES = {"pp": "pipeline_parallel", "tp": "tensor_parallel"}
STRATEGIES = ("decode_maximal", "prefill_priority", "balanced")
PRESSURES = ("none", "psutil", "nvml")

# Names of other llama.cpp front ends, too far from ours for a spelling check: they are suggested, never accepted.
_FOREIGN = {
    "n_ctx": "context_size",
    "ctx_size": "context_size",
    "n_gpu_layers": "gpu_layers",
    "ngl": "gpu_layers",
    "n_threads": "threads",
    "n_threads_batch": "threads_batch",
    "n_batch": "batch",
    "n_ubatch": "ubatch",
    "n_parallel": "slots",
    "cache_type_k": "type_k",
    "cache_type_v": "type_v",
    "lora": "adapters",
    "lora_path": "adapters",
}

Count = Annotated[int, Meta(ge=1, le=INT32_MAX, description="a whole number, 1 or more (at most 2,147,483,647)")]
Whole = Annotated[int, Meta(ge=0, le=INT32_MAX, description="a whole number, 0 or more")]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50, description="a number of bytes, 0 or more (0: none)")]
Index = Annotated[int, Meta(ge=0, le=1023, description="a whole number from 0 to 1,023")]
Layers = Annotated[int, Meta(ge=-1, le=INT32_MAX, description="a whole number, 0 or more, or -1 for all")]
# 256 is llama.cpp's LLAMA_MAX_SEQ; 512 is GGML_MAX_N_THREADS.
Slots = Annotated[int, Meta(ge=1, le=256, description="a whole number from 1 to 256")]
Threads = Annotated[int, Meta(ge=1, le=512, description="a whole number from 1 to 512")]
Flag = Annotated[bool, Meta(description="True or False")]
Text = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Finite = Annotated[float, Meta(ge=-1e30, le=1e30, description="a finite number")]
NotNegative = Annotated[float, Meta(ge=0, le=1e30, description="a finite number, 0 or more (0: the model's own)")]
Share = Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")]
Shares = Annotated[tuple[Annotated[float, Meta(ge=0, le=1e30)], ...], Meta(description="a list of numbers, 0 or more")]
Names = Annotated[tuple[Text, ...], Meta(description="a list of names")]
Tiers = Annotated[
    tuple[Literal["ram", "tmpfs", "disk"], ...], Meta(min_length=1, description="a list of 'ram', 'tmpfs' and 'disk'")
]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]


class AdapterFile(NamedTuple):
    """A LoRA adapter to apply, and how strongly."""

    path: Path
    scale: float = 1.0


class Strategy(Protocol):
    """An object that plans ticks; the engine says what a plan is."""

    def plan(self, view: Any, budget: Any) -> Any:
        """Decide what the next tick runs."""


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to load and run one model: every option of `kvasir.load`.

    None means the model's own or the machine's best: all layers on the GPU, the trained context, one thread per core.
    """

    gpu_layers: Layers | None = None
    split_mode: Literal["none", "layer", "row"] = "layer"
    main_gpu: Index = 0
    tensor_split: Shares = ()
    pipeline_parallel: Slots = 1
    tensor_parallel: Slots = 1
    devices: Names = ()
    use_mmap: Flag = True
    use_mlock: Flag = False
    vocab_only: Flag = False
    check_tensors: Flag = False
    model_dir: Path | None = None
    adapters: tuple[AdapterFile, ...] = ()

    context_size: Count | None = None
    batch: Count = 512
    ubatch: Count = 512
    threads: Threads | None = None
    threads_batch: Threads | None = None
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    swa_full: Flag = True
    offload_kqv: Flag = True
    op_offload: Flag = True
    rope_scaling: Literal["model", "none", "linear", "yarn", "longrope"] = "model"
    rope_freq_base: NotNegative = 0.0
    rope_freq_scale: NotNegative = 0.0
    yarn_ext_factor: Finite = -1.0  # negative: the model's own, here and below
    yarn_attn_factor: Finite = -1.0
    yarn_beta_fast: Finite = -1.0
    yarn_beta_slow: Finite = -1.0
    yarn_orig_ctx: Whole = 0

    slots: Slots = 4
    layout: Literal["auto", "unified", "split"] = "auto"
    strategy: str | Strategy = "decode_maximal"
    chunk_tokens: Count = 512
    prefill_budget: Count = 128
    max_queue: Count = 64
    observe: Callable[[Any], None] | None = None  # gets every event of the engine, on its thread

    cache: Flag = True
    cache_dir: Path | None = None  # None: `kv` in the store's home
    cache_ram_bytes: Bytes | None = None  # None: an eighth of the memory, 2 GiB at most
    cache_tmpfs_dir: Path | None = None
    cache_tmpfs_bytes: Bytes = 1 << 30
    cache_disk_bytes: Bytes = 10 << 30
    cache_tiers: Tiers = ("ram", "tmpfs", "disk")  # where this model's rows may lie
    # Who tells how full memory is: a name, or a function that returns (used, total) bytes.
    cache_pressure: Literal["none", "psutil", "nvml"] | Callable[[], tuple[int, int]] = "none"
    cache_pressure_high: Share = 0.85  # above this share, rows in memory are given up
    cache_pressure_low: Share = 0.75  # until it is below this one; at most the high one
    fingerprint_mode: Literal["safe", "chunked", "fast_unsafe"] = "safe"
    block_tokens: Count = 256
    min_tokens: Whole = 32
    cold_min_tokens: Whole = 32
    cold_max_tokens: Whole = 1 << 30
    continued_interval: Count = 256
    boundary_trim_tokens: Whole = 32
    boundary_align_tokens: Count = 256
    session_resume_wait_ms: Whole = 500


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where models are kept, and whether the network may be used to get them."""

    home: Path
    offline: Flag = False


def load_settings(
    options: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    toml_path: Path | None = None,
) -> LoadSettings:
    """Merge arguments, environment, `kvasir.toml` and defaults into one value.

    `toml_path=None` looks where `KVASIR_CONFIG` says, then in the working directory. Raises `BadOption`.
    """
    given = _gather("load", LOAD_OPTIONS, options, environ, toml_path)
    if layers := environ.get("GGML_N_GPU_LAYERS"):
        given["gpu_layers"] = _Given(_from_text(layers, int), "GGML_N_GPU_LAYERS")
    values = {name: _checked(name, each, _LOAD_HINTS[name]) for name, each in given.items()}
    return LoadSettings(**_settled(values, given))


def sampling_defaults(
    options: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    toml_path: Path | None = None,
) -> Sampling:
    """The `Sampling` that a call starts from: environment and `[sampling]` over the documented defaults."""
    given = _gather("sampling", SAMPLING_OPTIONS, options, environ, toml_path)
    for name, each in given.items():
        if each.source:
            _name_source(each.source, name, each.value)
    return Sampling.of(None, **{name: each.value for name, each in given.items()})


def store_settings(
    options: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    toml_path: Path | None = None,
) -> StoreSettings:
    """Where the store is: `KVASIR_HOME`, else `kvasir` in the user's cache folder (`XDG_CACHE_HOME`)."""
    given = _gather("store", STORE_OPTIONS, options, environ, toml_path)
    values = {name: _checked(name, each, _STORE_HINTS[name]) for name, each in given.items()}
    home = values.pop("home", None) or Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvasir"
    return StoreSettings(home=home.absolute(), **values)


def find_toml(environ: Mapping[str, str]) -> Path | None:
    """The settings file in force: the one `KVASIR_CONFIG` names, else `kvasir.toml` in the working directory."""
    if named := environ.get("KVASIR_CONFIG"):
        path = Path(named).expanduser()
        if not path.is_file():
            raise BadOption(f"KVASIR_CONFIG must name a TOML file, got {named!r}, which is none.")
        return path
    here = Path(TOML_NAME)
    return here if here.is_file() else None


# Below: from text and tables to checked values.


class _Given(NamedTuple):
    value: object
    source: str  # where it came from, as an error names it; empty for an argument


def _gather(
    table: str,
    known: Sequence[str],
    options: Mapping[str, object] | None,
    environ: Mapping[str, str],
    toml_path: Path | None,
) -> dict[str, _Given]:
    """The strongest value of each option that was given anywhere."""
    path = toml_path if toml_path is not None else find_toml(environ)
    given = _named(_read_toml(path, table), known, source=f"{path} [{table}]") if path is not None else {}
    return given | _from_environ(environ, known, _HINTS[table]) | _named(options or {}, known, source="")


def _named(options: Mapping[str, object], known: Sequence[str], source: str) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for name, value in options.items():
        full = ALIASES.get(name, name) if ALIASES.get(name) in known else name
        if full not in known:
            raise BadOption(f"unknown option {name!r}{_in(source)}.{_hint(name, known)}")
        if full in given:
            raise BadOption(f"{full} was given twice{_in(source)}, once by its short name.")
        given[full] = _Given(value, source)
    return given


def _in(source: str) -> str:
    return f" in {source}" if source else ""


def _hint(name: str, known: Sequence[str]) -> str:
    if _FOREIGN.get(name) in known:
        return f" Did you mean {_FOREIGN[name]!r}?"
    for table, others in _OPTIONS.items():
        if name in others and others is not known:
            return f" It is a {table} option."
    return suggest(name, known)


def _read_toml(path: Path, table: str) -> Mapping[str, object]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadOption(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadOption(f"{path} is not valid TOML: {error}.") from None
    for name, value in document.items():
        if name not in _OPTIONS:
            raise BadOption(f"unknown table {name!r} in {path}.{suggest(name, _OPTIONS)}")
        if not isinstance(value, dict):
            raise BadOption(f"{name!r} in {path} must be a table, as in [{name}].")
    return dict(document.get(table, {}))


def _from_environ(environ: Mapping[str, str], known: Sequence[str], hints: Mapping[str, Any]) -> dict[str, _Given]:
    _check_variables(environ)
    given = {}
    for name in known:
        variable = f"KVASIR_{name.upper()}"
        if text := environ.get(variable):
            given[name] = _Given(_from_text(text, hints[name]), variable)
    return given


def _check_variables(environ: Mapping[str, str]) -> None:
    """Refuse a variable that is nearly one of ours; others may belong to the build or to a later version."""
    for variable in environ:
        name = variable.removeprefix("KVASIR_")
        if name == variable or variable in _VARIABLES:
            continue
        if close := get_close_matches(name, [each.removeprefix("KVASIR_") for each in _VARIABLES], n=1, cutoff=0.85):
            raise BadOption(f"unknown variable {variable}. Did you mean KVASIR_{close[0]}?")


def _from_text(text: str, hint: Any) -> object:
    """What this text means for an option of this type; text that means nothing stays, for the check to refuse."""
    kinds = _kinds(hint)
    if NoneType in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        return _FLAGS.get(text.lower(), text)
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                return text
    if Mapping in kinds or Any in kinds:
        return _from_json(text)
    if str in kinds or not kinds & {tuple, Sequence}:
        return text
    return tuple(part.strip() for part in text.split(","))


def _from_json(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _kinds(hint: Any) -> set[Any]:
    """The plain types a hint is made of: `Annotated[int, ...] | None` is {int, NoneType}."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _kinds(get_args(hint)[0])
    if origin in (Union, UnionType):
        return set().union(*(_kinds(part) for part in get_args(hint)))
    return {origin or hint}


def _checked(name: str, given: _Given, hint: Any) -> Any:
    if special := _SPECIAL.get(name):
        return special(name, given)
    value = given.value
    if not isinstance(value, bool) and isinstance(value, Integral):
        value = int(value)  # numpy's integers too
    try:
        return msgspec.convert(value, hint, strict=not given.source.startswith("KVASIR_"))
    except msgspec.ValidationError:
        raise _refused(name, given, _wanted(hint)) from None


def _refused(name: str, given: _Given, wanted: str) -> BadOption:
    shown = repr(given.value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return BadOption(f"{name} must be {wanted}, got {shown}{f' from {given.source}' if given.source else ''}.")


def _wanted(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return next(str(meta.description) for meta in hint.__metadata__ if isinstance(meta, Meta))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return ", or ".join("None" if part is NoneType else _wanted(part) for part in get_args(hint))


def _flash_attn(name: str, given: _Given) -> str:
    value = _FLAGS.get(given.value.lower(), given.value) if isinstance(given.value, str) else given.value
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == "auto":
        return "auto"
    raise _refused(name, given, "'auto', 'on', 'off', True or False")


def _path(name: str, given: _Given) -> Path | None:
    if given.value is None and name != "home":
        return None
    if not isinstance(given.value, str | os.PathLike) or not os.fspath(given.value) or "\0" in str(given.value):
        raise _refused(name, given, "a path")
    return Path(given.value).expanduser()


def _adapters(name: str, given: _Given) -> tuple[AdapterFile, ...]:
    """Paths, (path, scale) pairs or {path, scale} tables; as text, `path` or `path=scale`, joined with commas."""
    value = given.value
    if isinstance(value, str | os.PathLike):
        value = [value]
    if not isinstance(value, Sequence):
        raise _refused(name, given, _ADAPTERS_WANTED)
    return tuple(_adapter(given, each) for each in value)


_ADAPTERS_WANTED = "a list of paths or (path, scale) pairs"


def _adapter(given: _Given, value: object) -> AdapterFile:
    scale: object = 1.0
    if isinstance(value, Mapping) and {"path"} <= set(value) <= {"path", "scale"}:
        scale, value = value.get("scale", 1.0), value["path"]
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        value, scale = value
    elif isinstance(value, str) and given.source.startswith("KVASIR_") and "=" in value:
        value, _, text = value.rpartition("=")
        scale = _from_text(text, float)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _refused("adapters", given, _ADAPTERS_WANTED)
    try:
        return AdapterFile(Path(value).expanduser(), msgspec.convert(scale, Finite))
    except msgspec.ValidationError:
        raise _refused("adapters", given, f"{_ADAPTERS_WANTED}, each scale a finite number") from None


def _strategy(name: str, given: _Given) -> object:
    value = given.value
    if isinstance(value, str):
        if value not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            raise BadOption(f"strategy must be one of {known}, got {value!r}.{suggest(value, STRATEGIES)}")
        return value
    if not callable(getattr(value, "plan", None)):
        raise _refused(name, given, "a name or an object with a `plan` method")
    return value


def _observe(name: str, given: _Given) -> object:
    if given.value is None or callable(given.value):
        return given.value
    raise _refused(name, given, "a function that takes one event, or None")


def _pressure(name: str, given: _Given) -> object:
    if given.value in PRESSURES or callable(given.value):
        return given.value
    known = ", ".join(map(repr, PRESSURES))
    raise _refused(name, given, f"one of {known}, or a function that returns (used, total) bytes")


def _settled(values: dict[str, Any], given: Mapping[str, _Given]) -> dict[str, Any]:
    """Options that bear on each other: layers, splits, batches, marks of pressure."""
    if values.get("gpu_layers") == -1:
        values["gpu_layers"] = None
    if values.get("tensor_parallel", 1) > 1:
        values["split_mode"] = "row"
    elif values.get("pipeline_parallel", 1) > 1:
        values["split_mode"] = "layer"
    batch, slots = values.get("batch", 512), values.get("slots", 4)
    if batch < slots:
        raise BadOption(
            f"batch must be at least slots ({slots}), for a token of each goes into one batch; got {batch}."
        )
    if values.setdefault("ubatch", min(512, batch)) > batch:
        raise _refused("ubatch", given["ubatch"], f"at most batch ({batch})")
    high = values.get("cache_pressure_high", 0.85)
    if values.setdefault("cache_pressure_low", min(0.75, high)) > high:
        raise _refused("cache_pressure_low", given["cache_pressure_low"], f"at most cache_pressure_high ({high})")
    return values


def _name_source(source: str, name: str, value: object) -> None:
    """Check one sampling value by itself, so that the error can say where it stands."""
    try:
        Sampling.of(None, **{name: value})
    except BadOption as error:
        raise BadOption(f"{source}: {error}") from None


LOAD_OPTIONS = LoadSettings.__struct_fields__
"""The name of every load option, in order."""
STORE_OPTIONS = StoreSettings.__struct_fields__

_OPTIONS: Mapping[str, Sequence[str]] = {"load": LOAD_OPTIONS, "sampling": SAMPLING_OPTIONS, "store": STORE_OPTIONS}
_LOAD_HINTS = get_type_hints(LoadSettings, include_extras=True)
_STORE_HINTS = get_type_hints(StoreSettings, include_extras=True)
_HINTS = {"load": _LOAD_HINTS, "sampling": get_type_hints(Sampling), "store": _STORE_HINTS}
_VARIABLES = {f"KVASIR_{name.upper()}" for names in _OPTIONS.values() for name in names} | {"KVASIR_CONFIG"}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SPECIAL = {
    "flash_attn": _flash_attn,
    "model_dir": _path,
    "cache_dir": _path,
    "cache_tmpfs_dir": _path,
    "home": _path,
    "adapters": _adapters,
    "strategy": _strategy,
    "cache_pressure": _pressure,
    "observe": _observe,
}
