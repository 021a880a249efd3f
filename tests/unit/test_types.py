"""Sampling: its defaults are the documented ones, and one that exists is valid."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.errors import BadOption
from kvasir.types import DEFAULT_SAMPLERS, SAMPLING_OPTIONS, FinishReason, Sampling


def test_the_defaults_are_the_documented_ones() -> None:
    s = Sampling()
    assert (s.max_tokens, s.temperature, s.top_k, s.top_p, s.min_p, s.min_keep) == (256, 0.8, 40, 0.95, 0.05, 1)
    assert (s.repeat_penalty, s.frequency_penalty, s.presence_penalty, s.penalty_last_n) == (1.0, 0.0, 0.0, 64)
    assert (s.seed, s.stop, s.grammar, s.json_schema, s.logit_bias, s.logprobs) == (None, (), None, None, None, None)
    assert s.ignore_eos is False
    assert s.order == DEFAULT_SAMPLERS


def test_the_default_order_is_that_of_llama_cpp() -> None:
    assert DEFAULT_SAMPLERS == (
        "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
    )  # fmt: skip


def test_shepherd_is_its_values_and_order() -> None:
    s = Sampling.shepherd()
    assert (s.temperature, s.top_p, s.top_k, s.min_keep) == (0.7, 0.9, 40, 1)
    assert s.order == ("top_k", "top_p", "penalties", "temperature")
    assert Sampling.shepherd(seed=3).seed == 3


def test_of_changes_only_what_was_given() -> None:
    base = Sampling(temperature=0, stop="x")
    changed = Sampling.of(base, max_tokens=3)
    assert (changed.temperature, changed.stop, changed.max_tokens) == (0.0, ("x",), 3)
    assert base.max_tokens == 256
    assert Sampling.of() == Sampling()


@pytest.mark.parametrize(("name", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens")])
def test_unknown_names_are_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(BadOption, match=f"unknown option '{name}'. Did you mean '{meant}'?"):
        Sampling.of(None, **{name: 1})


def test_of_refuses_a_base_that_is_no_sampling() -> None:
    with pytest.raises(BadOption, match=r"sampling must be a kvasir\.Sampling, got 3"):
        Sampling.of(3)  # type: ignore[arg-type]


BAD = [
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**31),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("min_p", 2),
    ("min_keep", -1),
    ("repeat_penalty", 0),
    ("frequency_penalty", math.nan),
    ("penalty_last_n", -2),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("stop", 3),
    ("stop", [""]),
    ("stop", ""),
    ("stop", b"x"),
    ("stop", [1]),
    ("grammar", 3),
    ("grammar", ""),
    ("json_schema", 3),
    ("logit_bias", [1]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {1: "x"}),
    ("logit_bias", {1: math.nan}),
    ("logprobs", -1),
    ("logprobs", True),
    ("ignore_eos", 1),
    ("samplers", "top_k"),
    ("samplers", ["topk"]),
    ("typical_p", 3),
    ("xtc_probability", 1.5),
    ("dynatemp_range", -1),
    ("dry_allowed_length", -1),
    ("dry_sequence_breakers", "\n"),
    ("mirostat", 3),
    ("adaptive_decay", 1.0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(BadOption) as caught:
        Sampling(**{name: value})
    text = str(caught.value)
    assert text.startswith(name)
    assert "\n" not in text


def test_the_error_says_what_was_wanted_and_what_came() -> None:
    with pytest.raises(BadOption, match=r"^top_p must be a number from 0 to 1, got 7\.$"):
        Sampling(top_p=7)
    with pytest.raises(BadOption, match=r"^top_k must be a whole number, 0 or more \(at most .*\), got -1\.$"):
        Sampling(top_k=-1)
    with pytest.raises(BadOption, match=r"^seed must be a whole number from 0 to .*, or None, got 'x'\.$"):
        Sampling(seed="x")  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"has no 'topk'.*Did you mean 'top_k'\?"):
        Sampling(samplers=["topk"])


def test_a_long_bad_value_is_cut_in_the_error() -> None:
    with pytest.raises(BadOption) as caught:
        Sampling(temperature="x" * 10_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_grammar_and_schema_together_are_refused() -> None:
    with pytest.raises(BadOption, match="grammar and json_schema were both given"):
        Sampling(grammar="root ::= 'a'", json_schema={})


def test_a_pydantic_model_class_is_a_schema() -> None:
    class Answer:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {}

    assert Sampling(json_schema=Answer).json_schema is Answer


def test_one_stop_string_is_a_list_of_one() -> None:
    assert Sampling(stop="\n").stop == ("\n",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")


def test_logit_bias_takes_text_keys_and_infinity_and_is_a_copy() -> None:
    given_bias: dict[Any, float] = {"42": -math.inf, 7: 1}
    kept = Sampling(logit_bias=given_bias).logit_bias
    given_bias[9] = 1
    assert kept == {42: -math.inf, 7: 1.0}


def test_numbers_are_kept_in_their_own_type() -> None:
    s = Sampling(temperature=0, top_k=3)
    assert type(s.temperature) is float
    assert type(s.top_k) is int


def test_a_sampling_is_frozen_and_travels() -> None:
    s = Sampling(seed=2**64 - 1, logit_bias={1: 2.0})
    with pytest.raises(AttributeError):
        s.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(s)) == s


def test_finish_reasons_are_their_text() -> None:
    assert [str(r) for r in FinishReason] == ["stop", "length", "cancelled", "tool_calls"]


_junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.text(max_size=2))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(SAMPLING_OPTIONS), _junk, max_size=4))
def test_any_options_make_a_sampling_or_a_bad_option(options: dict[str, Any]) -> None:
    try:
        Sampling.of(None, **options)
    except BadOption as error:
        assert str(error)  # noqa: PT017
