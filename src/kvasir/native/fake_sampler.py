"""The fake core's samplers: greedy, or a counter-based draw.

Owns the choice of a token from logits. A draw depends on (seed, index) alone,
as in the real core. Of the samplers it applies penalties, top_k, top_p, min_p and temperature; the other
names are checked and ignored. Grammars are followed by `fake_grammar.py`; they begin with the reply,
so `grammar_prefill` changes nothing here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir.errors import BadGrammar, BadOption, BadSchema, suggest
from kvasir.native.fake_budget import ReasoningBudget
from kvasir.native.fake_grammar import Grammar
from kvasir.native.fake_memory import mix
from kvasir.native.fake_vocab import Vocab

Logits = NDArray[np.float32]

SAMPLER_NAMES = [
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "infill",
    "logit_bias", "mirostat", "mirostat_v2", "adaptive_p",
]  # fmt: skip
_DEFAULT_ORDER = SAMPLER_NAMES[:9]


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
        self.grammar_prefill: list[int] = []
        self.reasoning_budget = -1
        self.reasoning_start: list[int] = []
        self.reasoning_ends: list[list[int]] = []
        self.reasoning_forced: list[int] = []
        self.reasoning_prefill: list[int] = []


@dataclass(slots=True)
class TokenLogprobs:
    """The log probability of the chosen token, and of the likeliest ones."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


class HasLogits(Protocol):
    """What a sampler asks of a context."""

    def logits(self, row: int) -> Logits:
        """Return the logits of an output row."""


class GrammarDead(Exception):
    """The grammar admits no token at all here."""


class Sampler:
    """Chooses tokens and remembers what it has accepted. One per sequence; not for two threads at once."""

    def __init__(self, vocab: Vocab, params: SamplerParams) -> None:
        self._vocab, self._params = vocab, copy(params)
        _check_params(vocab, params)
        self._grammar = Grammar(params.grammar, params.grammar_root) if params.grammar else None
        self.reset()

    @property
    def names(self) -> list[str]:
        """The chain as built."""
        extra = (("reasoning_budget", self._budget is not None), ("grammar", self._grammar is not None))
        return [*self._params.order, *(name for name, there in extra if there)]

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._params.seed

    @property
    def n_draws(self) -> int:
        """How many tokens were drawn: the index of the next draw."""
        return self._index

    def seek(self, index: int) -> None:
        """Set the index of the next draw."""
        if index < 0:
            raise BadOption(f"a draw index must be 0 or more, got {index}")
        self._index = index

    def reset(self) -> None:
        """Forget everything accepted and start at draw 0."""
        self._index, self._text, self._place = 0, b"", self._grammar
        self._history: list[int] = []
        self._awake = not self._params.grammar_lazy
        self._budget = _budget(self._params)

    def clone(self) -> Sampler:
        """Return an independent sampler in the same state."""
        twin = copy(self)
        twin._history, twin._budget = list(self._history), deepcopy(self._budget)
        return twin

    def accept(self, token: int, generated: bool = True) -> None:
        """Note a token; prompt tokens (`generated=False`) move the penalties only."""
        self._vocab.check(token)
        self._history.append(token)
        if not generated:
            return
        if self._grammar and not (self._params.grammar_lazy and self._budget and self._budget.thinking):
            self._accept_by_grammar(token)
        if self._budget is not None:
            self._budget.accept(token)
        self._index += 1

    def _accept_by_grammar(self, token: int) -> None:
        if self._awake and not self._allowed(token):
            raise BadGrammar(f"the grammar does not allow token {token} here")
        self._text += self._vocab.token_to_bytes(token)
        if self._awake:
            self._move(self._vocab.token_to_bytes(token))
            return
        text = self._text.decode("latin-1")
        found = [found for pattern in self._params.grammar_trigger_patterns if (found := re.search(pattern, text))]
        if token in self._params.grammar_trigger_tokens:
            self._awake, self._text = True, self._vocab.token_to_bytes(token, special=True)
        elif found:
            self._awake, self._text = True, self._text[found[0].start(found[0].lastindex or 0) :]
        if self._awake:
            self._move(self._text)

    def _move(self, piece: bytes) -> None:
        self._place = self._place.after(piece) if self._place is not None else None
        if self._place is None:
            raise BadGrammar(f"the grammar does not admit {piece!r} here")

    def accept_prompt(self, tokens: list[int]) -> None:
        """Note all tokens of a prompt; draws then start at index 0."""
        for token in tokens:
            self.accept(token, generated=False)
        self._index = 0

    def sample(self, context: HasLogits, row: int) -> int:
        """Choose from an output row of the last step, and accept the choice."""
        token = self.choose(context.logits(row))
        self.accept(token)
        return token

    def choose(self, logits: Logits) -> int:
        """Return the token for these logits without accepting it."""
        if self._budget is not None and self._budget.forced is not None:
            return self._budget.forced
        scores = logits.astype(np.float64)
        for token, bias in self._params.logit_bias:
            scores[token] += bias
        if self._params.ignore_eos:
            scores[self._vocab.eog_tokens] = -math.inf
        if self._grammar and self._awake:
            scores[[token for token in range(len(scores)) if not self._allowed(token)]] = -math.inf
            if not np.isfinite(scores).any():
                raise GrammarDead("the grammar admits no token here")
        if "penalties" in self._params.order:
            self._penalize(scores)
        if self._params.temperature <= 0:
            return int(np.argmax(scores))
        return self._draw(scores)

    def _allowed(self, token: int) -> bool:
        assert self._place is not None
        if self._vocab.is_eog(token):
            return self._place.may_end
        piece = self._vocab.token_to_bytes(token)
        return bool(piece) and self._place.after(piece) is not None

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


def _budget(p: SamplerParams) -> ReasoningBudget | None:
    wanted = p.reasoning_budget >= 0 or (p.grammar_lazy and p.grammar)
    if not p.reasoning_start or not p.reasoning_ends or not wanted:
        return None
    return ReasoningBudget(
        p.reasoning_start, p.reasoning_ends, p.reasoning_forced, p.reasoning_budget, p.reasoning_prefill
    )


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return probabilities for scores."""
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
    if p.min_keep < 1 or p.penalty_last_n < 0 or p.dry_penalty_last_n < 0:
        raise BadOption("min_keep must be at least 1, and the last_n of penalties cannot be negative")
    if p.mirostat not in (0, 1, 2):
        raise BadOption(f"mirostat must be 0, 1 or 2, got {p.mirostat}")
    if p.repeat_penalty <= 0:
        raise BadOption(f"repeat_penalty must be above 0, got {p.repeat_penalty}")
    if p.reasoning_budget < -1:
        raise BadOption(f"reasoning_budget is a number of tokens, or -1 for no limit, got {p.reasoning_budget}")
    marked = [p.reasoning_start, *p.reasoning_ends, p.reasoning_forced, p.reasoning_prefill]
    for token in [*(token for token, _ in p.logit_bias), *(token for tokens in marked for token in tokens)]:
        vocab.check(token)
