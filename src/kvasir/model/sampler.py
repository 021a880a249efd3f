"""A `Sampling` becomes the core's sampler chain.

Owns the mapping of names, what temperature 0 means, the seed that is drawn where none is given, JSON schemas (a dict or
a Pydantic model) as grammars, and what a chat adds (`Guide`). Called on the user's thread: building a grammar takes
milliseconds that the engine's thread does not have.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvasir import native
from kvasir.errors import BadOption, BadSchema
from kvasir.types import Sampling

if TYPE_CHECKING:
    from kvasir.model.grammar.schema import Compiled

# Options that mean the same, by the same name, in the core.
_SAME_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "min_keep", "repeat_penalty", "frequency_penalty", "presence_penalty",
    "ignore_eos", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
    "dynatemp_exponent", "dry_multiplier", "dry_base", "dry_allowed_length", "mirostat", "mirostat_tau",
    "mirostat_eta", "adaptive_target", "adaptive_decay",
)  # fmt: skip

# What still matters when the likeliest token is taken: the samplers that change logits, not those that cut the tail.
_GREEDY = frozenset({"penalties", "dry", "logit_bias", "temperature"})


class Built(NamedTuple):
    """A sampler and the seed it draws from."""

    sampler: native.Sampler
    seed: int


@dataclass(frozen=True, slots=True)
class Guide:
    """What a chat adds to sampling: a grammar for calls or answers, and how many tokens the model may think.

    `prompt` brings its own grammar and its marks of thinking. `grammar`, if given, takes the place of the prompt's own:
    it holds from the start, or from the text `wakes_on` on; with `prefilled` its text begins in the prompt.
    """

    prompt: native.ChatPrompt
    grammar: str | None = None
    wakes_on: str = ""
    prefilled: bool = False
    thinking_budget: int | None = None
    thinks_already: bool = False  # the prompt has begun the thinking

    def apply(self, params: native.SamplerParams, vocab: native.Vocab) -> None:
        """Set the core's plain values."""
        self.prompt.constrain(params, vocab)
        params.reasoning_budget = -1 if self.thinking_budget is None else self.thinking_budget
        # Exactly the start: in the prompt it may be split into other tokens, where its neighbours join it.
        params.reasoning_prefill = params.reasoning_start if self.thinks_already else []
        if self.grammar is None:
            return
        waking = vocab.tokenize(self.wakes_on, add_special=False, parse_special=True) if self.wakes_on else []
        params.grammar, params.grammar_lazy = self.grammar, bool(self.wakes_on)
        if not self.prefilled:
            params.grammar_prefill = []
        params.grammar_trigger_tokens = waking if len(waking) == 1 else []
        params.grammar_trigger_patterns = [_escaped(self.wakes_on)] if len(waking) > 1 else []


def build_sampler(
    core: ModuleType, vocab: native.Vocab, sampling: Sampling, *, n_ctx: int, guide: Guide | None = None
) -> Built:
    """Make the chain for one request. `n_ctx` is what a penalty over "the whole context" (-1) looks back on."""
    params = sampler_params(core, sampling, n_ctx=n_ctx)
    if guide is not None:
        guide.apply(params, vocab)
    for token, _ in params.logit_bias:
        if token >= vocab.n_tokens:
            raise BadOption(f"logit_bias names token {token}; this vocabulary has ids 0 to {vocab.n_tokens - 1}.")
    return Built(core.Sampler(vocab, params), params.seed)


def sampler_params(core: ModuleType, sampling: Sampling, *, n_ctx: int) -> native.SamplerParams:
    """Map every option to the core's plain value."""
    params: native.SamplerParams = core.SamplerParams()
    for name in _SAME_NAMES:
        setattr(params, name, getattr(sampling, name))
    params.seed = sampling.seed if sampling.seed is not None else random_seed()
    params.order = _order(sampling)
    params.penalty_last_n = n_ctx if sampling.penalty_last_n == -1 else sampling.penalty_last_n
    params.dry_penalty_last_n = n_ctx if sampling.dry_penalty_last_n == -1 else sampling.dry_penalty_last_n
    params.dry_sequence_breakers = list(sampling.dry_sequence_breakers)
    params.logit_bias = list((sampling.logit_bias or {}).items())
    params.grammar = grammar_of(sampling) or ""
    return params


def _escaped(text: str) -> str:
    """The text as a pattern in ECMAScript's syntax, where an escaped letter that needs none is an error."""
    return re.sub(r"[.^$|()*+?\[\]{}\\]", r"\\\g<0>", text)


def _order(sampling: Sampling) -> list[str]:
    order = list(sampling.order)
    if sampling.temperature > 0:
        return order
    # With the tail samplers left in, xtc could remove the likeliest token; without "temperature" it would be drawn.
    kept = [name for name in order if name in _GREEDY and name != "temperature"]
    return [*kept, "temperature"]


def grammar_of(sampling: Sampling) -> str | None:
    """The grammar the text must follow, from `grammar` or from `json_schema`; None where it is free."""
    if sampling.json_schema is None:
        return sampling.grammar
    return compiled_schema(sampling.json_schema).grammar


def compiled_schema(schema: Any) -> Compiled:
    """The grammar of a dict or of a Pydantic model class, with what it cannot enforce. Raises `BadSchema`."""
    # Here, not above: it brings the jsonschema package, and most programs never ask for JSON.
    from kvasir.model.grammar.schema import compile_schema

    return compile_schema(schema_json(schema))


def schema_json(schema: Any) -> str:
    """The JSON schema, as text, of a dict or of a Pydantic model class."""
    document = schema if isinstance(schema, Mapping) else schema.model_json_schema()
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise BadSchema(f"json_schema is no JSON: {error}.") from None


def parse_reply(schema: Any, text: str) -> Any:
    """The object a complete reply describes: plain JSON for a dict schema, an instance for a Pydantic model.

    It fits the whole schema, also what the grammar does not enforce; a reply that does not is `BadSchema`.
    """
    if isinstance(schema, Mapping):
        return compiled_schema(schema).check(text)
    try:
        return schema.model_validate_json(text)
    except ValueError as error:  # Pydantic's error is one
        raise BadSchema(f"the reply does not fit json_schema: {str(error).strip()}") from error


def feed(sampler: native.Sampler, tokens: list[int], *, n_resumed: int = 0) -> None:
    """Tell a sampler of its prompt; the last `n_resumed` tokens it made itself, before it was interrupted."""
    n_prompt = len(tokens) - n_resumed
    sampler.accept_prompt(tokens[:n_prompt])
    for token in tokens[n_prompt:]:
        sampler.accept(token)


def unsteady(sampler: native.Sampler) -> tuple[str, ...]:
    """Name the samplers of a chain whose state depends on more than the tokens, so that feeding cannot rebuild it."""
    return tuple(name for name in sampler.names if name in ("mirostat", "mirostat_v2", "adaptive_p"))


def random_seed() -> int:
    """Draw a seed: 32 bits, short enough to copy from a report, and as many as llama.cpp's own seeds have."""
    return secrets.randbits(32)
