"""The front door has these names and no others; a change here is a change of the public API."""

from __future__ import annotations

import dataclasses

import kvasir
from kvasir.service.cache_view import ModelCache
from kvasir.service.chat import CHAT_OPTIONS
from kvasir.service.options import ChatKeywords, SamplingOptions

PUBLIC = [
    "ChatReply",
    "Completion",
    "FinishReason",
    "KvasirError",
    "Model",
    "ModelInfo",
    "Runtime",
    "Sampling",
    "Service",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Tool",
    "Usage",
    "load",
]


def test_the_public_names_are_pinned() -> None:
    assert sorted(kvasir.__all__) == PUBLIC


def test_every_public_name_exists_and_is_documented() -> None:
    for name in kvasir.__all__:
        assert getattr(kvasir, name).__doc__, name


def test_dir_shows_the_public_names() -> None:
    assert set(PUBLIC) <= set(dir(kvasir))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kvasir, "Lama")


def test_the_typed_keywords_of_a_chat_are_the_fields_of_its_options() -> None:
    assert set(ChatKeywords.__annotations__) - set(SamplingOptions.__annotations__) == set(CHAT_OPTIONS)


def test_the_typed_keywords_are_the_fields_of_sampling() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(kvasir.Sampling)}
    keywords = {name: hint.__forward_arg__ for name, hint in SamplingOptions.__annotations__.items()}
    assert keywords == fields


METHODS = {
    "Model": [
        "achat",
        "aembed",
        "agenerate",
        "arerank",
        "arun_tools",
        "cache",
        "chat",
        "chat_stream",
        "close",
        "closed",
        "conversation",
        "count_tokens",
        "detokenize",
        "embed",
        "generate",
        "info",
        "limit",
        "open",
        "read",
        "render",
        "rerank",
        "run_tools",
        "stats",
        "stream",
        "tokenize",
    ],
    "Runtime": ["aload", "aunload", "cache", "close", "closed", "load", "model", "models", "open", "unload"],
    "Service": [
        "aappend_input",
        "acancel_generate",
        "acreate_session",
        "aend_session",
        "agenerate_stream",
        "aload",
        "append_input",
        "areload",
        "arestore_session",
        "cancel_generate",
        "close",
        "closed",
        "create_session",
        "current",
        "end_session",
        "generate_stream",
        "info",
        "limit",
        "load",
        "n_workers",
        "open",
        "reload",
        "restore_session",
        "session",
        "sessions",
        "stats",
    ],
    "Stream": ["cancel", "result"],
}

VALUES = {
    "ChatReply": [
        "content", "finish_reason", "key", "logprobs", "message", "messages", "parsed", "reasoning", "seed", "stop",
        "timings", "tool_calls", "usage",
    ],
    "Tool": ["call", "description", "function", "is_async", "name", "of", "parameters", "schema"],
}  # fmt: skip

CACHE_METHODS = ["clear", "ls", "prune", "stats", "verify", "warm"]


def test_the_public_methods_are_pinned_and_documented() -> None:
    for name, methods in METHODS.items():
        kind = getattr(kvasir, name)
        assert [member for member in dir(kind) if not member.startswith("_")] == methods
        for method in methods:
            assert getattr(kind, method).__doc__, f"{name}.{method}"


def test_the_fields_of_values_are_pinned() -> None:
    for name, members in VALUES.items():
        assert [member for member in dir(getattr(kvasir, name)) if not member.startswith("_")] == members


def test_the_calls_of_a_models_cache_are_pinned_and_documented() -> None:
    assert [member for member in dir(ModelCache) if not member.startswith("_")] == CACHE_METHODS
    for method in CACHE_METHODS:
        assert getattr(ModelCache, method).__doc__, method
