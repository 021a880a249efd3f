"""Values that every layer shares: what to sample and what came out.

Owns their names, defaults and ranges: a `Sampling` that exists is valid, so no layer below checks it again. Only
plain frozen values of the standard library; what a model cannot do (a token id outside its vocabulary, a grammar
that does not parse) is for those who hold the model to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, NamedTuple

from kvasir.errors import BadOption, suggest

SAMPLER_NAMES = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
    "infill", "logit_bias", "mirostat", "mirostat_v2", "adaptive_p",
)  # fmt: skip
"""Every sampler `Sampling.samplers` may name."""

DEFAULT_SAMPLERS = SAMPLER_NAMES[:9]
"""llama.cpp's order, used where `Sampling.samplers` is None."""

INT32_MAX = 2**31 - 1  # llama.cpp counts in int32
SEED_MAX = 2**64 - 1


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-generation token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"  # a chat reply that wants functions called


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `cached_tokens` is the part of `prompt_tokens` that was not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds one request spent waiting, reading its prompt, until its first token, and writing."""

    queue_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token, its log probability, and the likeliest alternatives as (token, text, logprob)."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request produced.

    `stop` is the stop string that matched, if one did. `seed` is the seed in use, also where none was given.
    `logprobs` has one entry per token where they were asked for. `parsed` is the object a `json_schema` described.
    `key` names what the request left in the cache: the `parent_key` of one that continues it.
    `fresh_samplers` names samplers of a resumed request whose state could not be rebuilt, so that they began anew.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    seed: int
    usage: Usage
    timings: Timings
    parsed: Any = field(default=None)
    key: str | None = None
    fresh_samplers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens, and when to stop.

    >>> greedy = Sampling(temperature=0, max_tokens=32)
    >>> Sampling.of(greedy, stop="\\n\\n").stop
    ('\\n\\n',)

    `temperature=0` is greedy. `top_k=0`, `top_p=1`, `min_p=0` and `typical_p=1` switch those samplers off.
    `seed=None` draws one, which the completion reports. `samplers` names which samplers run and in which order.
    `logprobs=n` reports each token's log probability and the n likeliest alternatives. `penalty_last_n=-1` looks
    back over the whole context. Raises `BadOption` for values out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    min_keep: int = 1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    stop: str | Sequence[str] = ()  # kept as a tuple, whatever was given
    grammar: str | None = None
    json_schema: Any = None  # a dict or a Pydantic model class
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    samplers: Sequence[str] | None = None
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9

    def __post_init__(self) -> None:
        for name, span in _NUMBERS.items():
            self._keep(name, _number(name, getattr(self, name), span))
        self._keep("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._keep("dry_sequence_breakers", _texts("dry_sequence_breakers", self.dry_sequence_breakers))
        self._keep("logit_bias", _biases(self.logit_bias))
        if self.samplers is not None:
            self._keep("samplers", _sampler_order(self.samplers))
        _check_flag("ignore_eos", self.ignore_eos)
        _check_constraint(self.grammar, self.json_schema)

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, base: Sampling | None = None, **options: Any) -> Sampling:
        """Return `base` (or the defaults) with these options changed; unknown names raise `BadOption`."""
        if base is not None and not isinstance(base, Sampling):
            raise BadOption(f"sampling must be a kvasir.Sampling, got {_shown(base)}.")
        for name in options:
            if name not in SAMPLING_OPTIONS:
                raise BadOption(f"unknown option {name!r}.{suggest(name, SAMPLING_OPTIONS)}")
        return replace(base if base is not None else cls(), **options)

    @classmethod
    def shepherd(cls, **options: Any) -> Sampling:
        """Return shepherd's values and order (top_k, top_p, penalties, temperature), with these options changed."""
        preset = cls(
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_keep=1,
            repeat_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            penalty_last_n=64,
            samplers=("top_k", "top_p", "penalties", "temperature"),
        )
        return cls.of(preset, **options)

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers that run, in order: `samplers`, or llama.cpp's order where it is None."""
        return tuple(self.samplers) if self.samplers is not None else DEFAULT_SAMPLERS


SAMPLING_OPTIONS = tuple(f.name for f in fields(Sampling))
"""The name of every sampling option, in order."""


class _Span(NamedTuple):
    """What a number may be: [least, most], whole or not, and whether None is allowed."""

    least: float
    most: float
    whole: bool = False
    optional: bool = False
    positive: bool = False  # `least` itself is not allowed


def _whole(least: int, most: int = INT32_MAX, *, optional: bool = False) -> _Span:
    return _Span(least, most, whole=True, optional=optional)


_SHARE = _Span(0.0, 1.0)
_NOT_NEGATIVE = _Span(0.0, math.inf)
_ANY = _Span(-math.inf, math.inf)

_NUMBERS: Mapping[str, _Span] = {
    "max_tokens": _whole(1),
    "temperature": _NOT_NEGATIVE,
    "top_k": _whole(0),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "min_keep": _whole(0),
    "repeat_penalty": _Span(0.0, math.inf, positive=True),  # llama.cpp divides by it
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "penalty_last_n": _whole(-1),
    "seed": _whole(0, SEED_MAX, optional=True),
    "logprobs": _whole(0, 2**20, optional=True),  # no vocabulary is larger
    "typical_p": _SHARE,
    "top_n_sigma": _ANY,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "dynatemp_range": _NOT_NEGATIVE,
    "dynatemp_exponent": _NOT_NEGATIVE,
    "dry_multiplier": _NOT_NEGATIVE,
    "dry_base": _NOT_NEGATIVE,
    "dry_allowed_length": _whole(0),
    "dry_penalty_last_n": _whole(-1),
    "mirostat": _whole(0, 2),
    "mirostat_tau": _NOT_NEGATIVE,
    "mirostat_eta": _NOT_NEGATIVE,
    "adaptive_target": _Span(-math.inf, 1.0),
    "adaptive_decay": _Span(0.0, 0.99),  # llama.cpp's own bound
}


def _number(name: str, value: object, span: _Span) -> int | float | None:
    if value is None and span.optional:
        return None
    kind = Integral if span.whole else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise BadOption(f"{name} must be {_wanted(span)}, got {_shown(value)}.")
    number = int(value) if isinstance(value, Integral) else float(value)
    if not span.whole and not math.isfinite(number):
        raise BadOption(f"{name} must be {_wanted(span)}, got {_shown(value)}.")
    if not span.least <= number <= span.most or (span.positive and number == span.least):
        raise BadOption(f"{name} must be {_wanted(span)}, got {_shown(value)}.")
    return number if span.whole else float(number)


def _wanted(span: _Span) -> str:
    kind = "a whole number" if span.whole else "a number"
    if span.positive:
        return f"{kind} above {span.least:g}"
    least = None if math.isinf(span.least) else f"{span.least:g}"
    most = None if math.isinf(span.most) or span.most == INT32_MAX else _plain(span.most)
    if least is not None and most is not None:
        bounds = f" from {least} to {most}"
    elif least is not None:
        bounds = f", {least} or more"
        bounds += f" (at most {INT32_MAX:,})" if span.most == INT32_MAX else ""
    else:
        bounds = f", {most} or less" if most is not None else ", finite"
    return kind + bounds + (", or None" if span.optional else "")


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadOption(f"{name} must be a list of strings, got {_shown(value)}.")
    for text in value:
        if not isinstance(text, str) or not text:
            raise BadOption(f"{name} must hold strings that are not empty, got {_shown(text)}.")
    return tuple(value)


def _sampler_order(value: object) -> tuple[str, ...]:
    names = _texts("samplers", value)
    for name in names:
        if name not in SAMPLER_NAMES:
            known = ", ".join(SAMPLER_NAMES)
            raise BadOption(f"samplers has no {name!r}; it may name {known}.{suggest(name, SAMPLER_NAMES)}")
    return names


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadOption(f"logit_bias must map token ids to numbers, got {_shown(value)}.")
    return {_bias_token(token): _bias(bias) for token, bias in value.items()}


def _bias_token(value: object) -> int:
    # JSON and TOML know only text keys, so {"42": -1} means token 42.
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= INT32_MAX:
        raise BadOption(f"logit_bias must have token ids as keys, got {_shown(value)}.")
    return int(value)


def _bias(value: object) -> float:
    # Infinity is meant: it forbids or forces a token.
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise BadOption(f"logit_bias must have numbers as values, got {_shown(value)}.")
    return float(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise BadOption(f"{name} must be True or False, got {_shown(value)}.")


def _check_constraint(grammar: object, schema: object) -> None:
    if grammar is not None and schema is not None:
        raise BadOption("grammar and json_schema were both given; a text can follow only one of them.")
    if grammar is not None and (not isinstance(grammar, str) or not grammar):
        raise BadOption(f"grammar must be GBNF text, got {_shown(grammar)}.")
    if schema is not None and not isinstance(schema, Mapping) and not hasattr(schema, "model_json_schema"):
        raise BadOption(f"json_schema must be a dict or a Pydantic model class, got {_shown(schema)}.")


def _shown(value: object) -> str:
    """The value as an error shows it: short, with its type where that is not plain."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
