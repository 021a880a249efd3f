"""The keywords of every generating method, for editors and type checkers.

Owns names and types only, the same as the fields of `kvasir.Sampling`, which checks the values; a test keeps the two
equal. With it a misspelled option is found while it is typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kvasir.types import Sampling


class SamplingOptions(TypedDict, total=False):
    """Options of `Model.generate`, `stream` and `agenerate`; see `kvasir.Sampling` for what they mean."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_keep: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    seed: int | None
    stop: str | Sequence[str]
    grammar: str | None
    json_schema: Any
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    ignore_eos: bool
    samplers: Sequence[str] | None
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float


class GenerateOptions(SamplingOptions, total=False):
    """What `Model.generate` takes besides: how the request is queued, and what of it is reused."""

    sampling: Sampling | None
    priority: int
    deadline: float | None
    cache: bool
    scope: str | None
    parent_key: str | None
    resumed_tokens: int


class ChatKeywords(SamplingOptions, total=False):
    """What `Model.chat` takes besides; see `kvasir.service.chat.ChatOptions` for what they mean."""

    tools: Sequence[Any] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    enable_thinking: bool | None
    thinking_budget: int | None
    template: str | Path | None
    template_kwargs: Mapping[str, Any] | None
    continue_final: bool
    response_format: Mapping[str, Any] | None
    regex: str | None
    choices: Any
