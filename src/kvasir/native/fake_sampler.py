"""The fake core's vocabulary and samplers: bytes for tokens, greedy or a counter-based draw.

Owns the byte-level vocabulary and the choice of a token from logits. A draw depends on (seed, index) alone,
as in the real core. Of the samplers it applies penalties, top_k, top_p, min_p and temperature; the other
names are checked and ignored. Of grammars it knows alternatives of literals; anything else is `BadGrammar`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.errors import BadGrammar, BadOption, BadSchema, TokenizeFailed, suggest
from kvasir.native.fake_memory import mix

Logits = NDArray[np.float32]

SAMPLER_NAMES = [
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "infill",
    "logit_bias", "mirostat", "mirostat_v2", "adaptive_p",
]  # fmt: skip
_DEFAULT_ORDER = SAMPLER_NAMES[:9]
_MERGED = (b" the", b"he", b"ing")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB = 256 + len(_MERGED) + len(_SPECIAL)


class Vocab:
    """Ids 0 to 255 are bytes, then a few merged tokens, then the special ones; the rest is unused filler."""

    kind = "bpe"
    sep = pad = mask = fim_pre = fim_suf = fim_mid = None

    def __init__(self, n_tokens: int = MIN_VOCAB, *, add_bos: bool = False) -> None:
        if n_tokens < MIN_VOCAB:
            raise BadOption(f"a fake vocabulary has at least {MIN_VOCAB} tokens, got {n_tokens}")
        filler = (f"<|unused_{i}|>" for i in range(n_tokens - MIN_VOCAB))
        self._pieces = [bytes([b]) for b in range(256)] + list(_MERGED)
        self._special = {len(self._pieces) + i: text for i, text in enumerate((*_SPECIAL, *filler))}
        self.n_tokens = n_tokens
        self.nl: int | None = ord("\n")
        first = len(self._pieces)
        self.bos: int | None = first
        self.eos: int | None = first
        self.eot: int | None = first + 2
        self.eog_tokens = [first, first + 2]
        self.add_bos, self.add_eos = add_bos, False

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        try:
            plain = text if isinstance(text, str) else text.decode()
            plain.encode()
        except UnicodeError as error:
            raise TokenizeFailed(f"the text is not valid UTF-8: {error}") from error
        ids = {special: token for token, special in self._special.items()}
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", plain) if parse_special else [plain]
        tokens = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        for part in parts:
            tokens += [ids[part]] if parse_special and part in ids else _byte_tokens(part.encode())
        return tokens

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        self.check(token)
        if token in self._special:
            return self._special[token].encode() if special else b""
        return self._pieces[token]

    def detokenize(self, tokens: list[int], *, remove_special: bool = False, unparse_special: bool = False) -> bytes:
        if remove_special and self.add_bos and tokens[:1] == [self.bos]:
            tokens = tokens[1:]
        return b"".join(self.token_to_bytes(token, special=unparse_special) for token in tokens)

    def text(self, token: int) -> str:
        return self.token_to_bytes(token, special=True).decode("latin-1")

    def score(self, token: int) -> float:
        self.check(token)
        return 0.0

    def is_eog(self, token: int) -> bool:
        self.check(token)
        return token in self.eog_tokens

    def is_control(self, token: int) -> bool:
        self.check(token)
        return token in self._special

    def check(self, token: int) -> None:
        if not 0 <= token < self.n_tokens:
            raise BadOption(f"token {token} does not exist; this vocabulary has 0 to {self.n_tokens - 1}")


class SamplerParams:
    """How to choose a token. A plain value: set the fields, then make a `Sampler` from it."""

    def __init__(self) -> None:
        self.seed = 0
        self.order = list(_DEFAULT_ORDER)
        self.temperature, self.dynatemp_range, self.dynatemp_exponent = 0.8, 0.0, 1.0
        self.top_k, self.top_p, self.min_p, self.min_keep = 40, 0.95, 0.05, 1
        self.typical_p, self.top_n_sigma = 1.0, -1.0
        self.xtc_probability, self.xtc_threshold = 0.0, 0.1
        self.penalty_last_n, self.repeat_penalty = 64, 1.0
        self.frequency_penalty, self.presence_penalty = 0.0, 0.0
        self.dry_multiplier, self.dry_base, self.dry_allowed_length, self.dry_penalty_last_n = 0.0, 1.75, 2, 64
        self.dry_sequence_breakers = ["\n", ":", '"', "*"]
        self.mirostat, self.mirostat_tau, self.mirostat_eta = 0, 5.0, 0.1
        self.adaptive_target, self.adaptive_decay = -1.0, 0.9
        self.logit_bias: list[tuple[int, float]] = []
        self.ignore_eos = False
        self.grammar, self.grammar_root, self.grammar_lazy = "", "root", False
        self.grammar_trigger_patterns: list[str] = []
        self.grammar_trigger_tokens: list[int] = []


@dataclass(slots=True)
class TokenLogprobs:
    """The log probability of the chosen token, and of the likeliest ones."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


class HasLogits(Protocol):
    def logits(self, row: int) -> Logits: ...


class GrammarDead(Exception):
    """The grammar admits no token at all here."""


class Sampler:
    """Chooses tokens and remembers what it has accepted. One per sequence; not for two threads at once."""

    def __init__(self, vocab: Vocab, params: SamplerParams) -> None:
        self._vocab, self._params = vocab, copy(params)
        _check_params(vocab, params)
        self._literals = _literals(params.grammar, params.grammar_root)
        self.reset()

    @property
    def names(self) -> list[str]:
        return [*self._params.order, "grammar"] if self._literals else list(self._params.order)

    @property
    def seed(self) -> int:
        return self._params.seed

    @property
    def n_draws(self) -> int:
        return self._index

    def seek(self, index: int) -> None:
        if index < 0:
            raise BadOption(f"a draw index must be 0 or more, got {index}")
        self._index = index

    def reset(self) -> None:
        self._index, self._text, self._ended = 0, b"", False
        self._history: list[int] = []

    def clone(self) -> Sampler:
        twin = copy(self)
        twin._history = list(self._history)
        return twin

    def accept(self, token: int, generated: bool = True) -> None:
        self._vocab.check(token)
        self._history.append(token)
        if not generated:
            return
        self._index += 1
        if self._literals:
            if not self._allowed(token):
                raise BadOption(f"the grammar does not allow token {token} here")
            self._text += self._vocab.token_to_bytes(token)
            self._ended = self._vocab.is_eog(token)

    def accept_prompt(self, tokens: list[int]) -> None:
        for token in tokens:
            self.accept(token, generated=False)
        self._index = 0

    def sample(self, context: HasLogits, row: int) -> int:
        token = self.choose(context.logits(row))
        self.accept(token)
        return token

    def choose(self, logits: Logits) -> int:
        """Return the token for these logits without accepting it."""
        scores = logits.astype(np.float64)
        for token, bias in self._params.logit_bias:
            scores[token] += bias
        if self._params.ignore_eos:
            scores[self._vocab.eog_tokens] = -math.inf
        if self._literals:
            scores[[token for token in range(len(scores)) if not self._allowed(token)]] = -math.inf
            if not np.isfinite(scores).any():
                raise GrammarDead("the grammar admits no token here")
        if "penalties" in self._params.order:
            self._penalize(scores)
        if self._params.temperature <= 0:
            return int(np.argmax(scores))
        return self._draw(scores)

    def _allowed(self, token: int) -> bool:
        if self._vocab.is_eog(token):
            return self._text in self._literals and not self._ended
        longer = self._text + self._vocab.token_to_bytes(token)
        return longer != self._text and any(literal.startswith(longer) for literal in self._literals)

    def _penalize(self, scores: NDArray[np.float64]) -> None:
        p = self._params
        recent = self._history[-p.penalty_last_n :] if p.penalty_last_n > 0 else []
        for token, n in Counter(recent).items():
            repeat = p.repeat_penalty if scores[token] <= 0 else 1 / p.repeat_penalty
            scores[token] = scores[token] * repeat - n * p.frequency_penalty - p.presence_penalty

    def _draw(self, scores: NDArray[np.float64]) -> int:
        p = self._params
        order = np.argsort(-scores, kind="stable")
        for name in p.order:
            probs = softmax(scores[order])
            if name == "top_k" and p.top_k > 0:
                order = order[: max(p.top_k, p.min_keep)]
            elif name == "top_p" and p.top_p < 1:
                order = order[: max(int(np.searchsorted(np.cumsum(probs), p.top_p)) + 1, p.min_keep)]
            elif name == "min_p" and p.min_p > 0:
                order = order[: max(int((probs >= p.min_p * probs[0]).sum()), p.min_keep)]
            elif name == "temperature":
                scores = scores / p.temperature
        u = mix(p.seed, self._index) / 2**64
        at = int(np.searchsorted(np.cumsum(softmax(scores[order])), u, side="right"))
        return int(order[min(at, len(order) - 1)])


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def logprobs_of(logits: Logits, token: int, n_top: int) -> TokenLogprobs:
    """Log probabilities of the unchanged logits, before any sampler."""
    logs = np.log(softmax(logits.astype(np.float64)))
    best = np.argsort(-logs, kind="stable")[:n_top]
    return TokenLogprobs(float(logs[token]), [(int(i), float(logs[i])) for i in best])


def json_schema_to_grammar(schema_json: str) -> str:
    """Return a grammar that admits one small instance of the schema: enough to test what stands above."""
    try:
        instance = _instance(json.loads(schema_json))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadSchema(f"this is not a JSON schema: {error}") from error
    return f"root ::= {json.dumps(json.dumps(instance))}"


def _instance(schema: Any) -> Any:
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kinds: dict[str, Any] = {"string": "a", "integer": 1, "number": 1, "boolean": True, "null": None}
    kind = schema.get("type", "object")
    if kind == "array":
        return [_instance(schema.get("items", {"type": "integer"}))] * int(schema.get("minItems", 1))
    if kind == "object":
        return {name: _instance(part) for name, part in schema.get("properties", {}).items()}
    return kinds[kind]


def _byte_tokens(data: bytes) -> list[int]:
    tokens, at = [], 0
    while at < len(data):
        merged = next((i for i, piece in enumerate(_MERGED) if data.startswith(piece, at)), None)
        tokens.append(data[at] if merged is None else 256 + merged)
        at += 1 if merged is None else len(_MERGED[merged])
    return tokens


_STRING = r'"(?:[^"\\\n]|\\.)*"'


def _literals(grammar: str, root: str) -> tuple[bytes, ...]:
    if not grammar:
        return ()
    pattern = rf"\s*{re.escape(root)}\s*::=\s*({_STRING}(?:\s*\|\s*{_STRING})*)\s*"
    match = re.fullmatch(pattern, grammar)
    if match is None:
        raise BadGrammar(f'the fake core knows grammars like {root} ::= "yes" | "no" only, got {grammar!r}')
    return tuple(ast.literal_eval(text).encode() for text in re.findall(_STRING, match[1]))


def _check_params(vocab: Vocab, p: SamplerParams) -> None:
    for name in p.order:
        if name not in SAMPLER_NAMES:
            raise BadOption(f"there is no sampler named {name!r}.{suggest(name, SAMPLER_NAMES)}")
    numbers = {name: value for name, value in vars(p).items() if isinstance(value, float)}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise BadOption(f"{name} must be a finite number, got {value}")
    if not 0 <= p.seed < 2**64:
        raise BadOption(f"seed must be 0 to 2**64-1, got {p.seed}")
    if p.mirostat not in (0, 1, 2):
        raise BadOption(f"mirostat must be 0, 1 or 2, got {p.mirostat}")
    if p.repeat_penalty <= 0:
        raise BadOption(f"repeat_penalty must be above 0, got {p.repeat_penalty}")
    for token, _ in p.logit_bias:
        vocab.check(token)
