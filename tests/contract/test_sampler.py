"""Choosing tokens: what greedy means, what a seed promises, what a grammar enforces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvasir.errors import BadGrammar, BadOption
from tests.contract.core import Core, some_tokens

PROMPT = some_tokens(12)
# Nothing but the draw decides: every token keeps a chance.
WIDE: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def ready(core: Core) -> Any:
    """Return a context with one output row to sample from, as often as wanted."""
    context = core.context()
    assert context.step([core.row(0, 0, PROMPT, output=True)]).status == "ok"
    return context


def test_the_defaults_are_llama_cpps(core: Core) -> None:
    params = core.native.SamplerParams()
    assert params.order == [
        "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
    ]  # fmt: skip
    expected = {
        "seed": 0, "temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.95,
        "min_p": 0.05, "min_keep": 1, "typical_p": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0,
        "xtc_threshold": 0.1, "penalty_last_n": 64, "repeat_penalty": 1.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0,
        "adaptive_decay": 0.9, "ignore_eos": False, "grammar": "", "grammar_root": "root", "grammar_lazy": False,
        "logit_bias": [], "grammar_trigger_patterns": [], "grammar_trigger_tokens": [], "grammar_prefill": [],
        "reasoning_budget": -1, "reasoning_start": [], "reasoning_ends": [], "reasoning_forced": [],
        "reasoning_prefill": [],
    }  # fmt: skip
    for name, value in expected.items():
        assert getattr(params, name) == pytest.approx(value), name
    assert params.dry_sequence_breakers == ["\n", ":", '"', "*"]


def test_temperature_zero_takes_the_likeliest_token(core: Core, kind: str) -> None:
    context = core.context(kind)
    sampler, tokens, pos = core.sampler(), PROMPT, 0
    for _ in range(16):
        step = context.step([core.row(0, pos, tokens, sampler=sampler)])
        assert step.tokens[0] == int(np.argmax(context.logits(0)))
        pos, tokens = pos + len(tokens), [step.tokens[0]]


def test_the_same_seed_gives_the_same_tokens(core: Core) -> None:
    runs = [core.generate(core.context(), 0, PROMPT, core.sampler(seed=seed, **WIDE), 24) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_seed_may_have_64_bits(core: Core) -> None:
    context = ready(core)
    series = []
    for seed in (1, 1 + (1 << 32), (1 << 64) - 1):
        sampler = core.sampler(seed=seed, **WIDE)
        assert sampler.seed == seed
        series.append([sampler.sample(context, 0) for _ in range(16)])
    assert series[0] != series[1] != series[2]


def test_a_draw_depends_on_the_seed_and_its_index_alone(core: Core) -> None:
    context = ready(core)
    sampler = core.sampler(seed=3, **WIDE)
    draws = [sampler.sample(context, 0) for _ in range(16)]
    assert len(set(draws)) > 1
    assert sampler.n_draws == 16
    for i in (15, 4, 0, 9):
        other = core.sampler(seed=3, **WIDE)
        other.seek(i)
        assert other.n_draws == i
        assert other.sample(context, 0) == draws[i]


def test_batching_does_not_change_what_a_seed_gives(core: Core, unified: bool) -> None:
    alone = core.generate(core.context(kv_unified=unified), 0, PROMPT, core.sampler(seed=5, **WIDE), 8)
    context = core.context(kv_unified=unified)
    samplers = [core.sampler(seed=seed, **WIDE) for seed in (4, 5, 6)]
    tokens, pos, made = [PROMPT] * 3, 0, []
    for _ in range(8):
        rows = [core.row(seq, pos, tokens[seq], sampler=samplers[seq]) for seq in range(3)]
        step = context.step(rows)
        pos += len(tokens[0])
        tokens = [[token] for token in step.tokens]
        made.append(step.tokens[1])
    assert made == alone


def test_a_clone_goes_on_where_the_original_stands(core: Core) -> None:
    context = ready(core)
    sampler = core.sampler(seed=3, presence_penalty=1.0, **WIDE)
    for _ in range(5):
        sampler.sample(context, 0)
    clone = sampler.clone()
    assert clone.n_draws == 5
    assert clone.seed == 3
    assert clone.names == sampler.names
    expected = [sampler.sample(context, 0) for _ in range(8)]
    assert [clone.sample(context, 0) for _ in range(8)] == expected


def test_a_reset_sampler_starts_again(core: Core) -> None:
    context = ready(core)
    sampler = core.sampler(seed=3, presence_penalty=5.0, **WIDE)
    first = [sampler.sample(context, 0) for _ in range(8)]
    sampler.reset()
    assert sampler.n_draws == 0
    assert [sampler.sample(context, 0) for _ in range(8)] == first


def test_a_bias_decides(core: Core) -> None:
    context = ready(core)
    assert core.sampler(logit_bias=[(65, 1000.0)]).sample(context, 0) == 65
    likeliest = core.sampler().sample(context, 0)
    assert core.sampler(logit_bias=[(likeliest, -math.inf)]).sample(context, 0) != likeliest


def test_end_tokens_can_be_ignored(core: Core) -> None:
    context = ready(core)
    ends = core.model().vocab.eog_tokens
    bias = [(token, 1000.0) for token in ends]
    assert core.sampler(logit_bias=bias).sample(context, 0) in ends
    assert core.sampler(logit_bias=bias, ignore_eos=True).sample(context, 0) not in ends


def test_penalties_see_what_was_sampled_and_the_prompt(core: Core) -> None:
    context = ready(core)
    sampler = core.sampler(presence_penalty=1000.0)
    made = [sampler.sample(context, 0) for _ in range(10)]
    assert len(set(made)) == 10
    warned = core.sampler(presence_penalty=1000.0)
    warned.accept_prompt(made[:1])
    assert warned.n_draws == 0
    assert warned.sample(context, 0) == made[1]


def test_accepting_a_generated_token_moves_the_draw_and_a_prompt_token_does_not(core: Core) -> None:
    sampler = core.sampler()
    sampler.accept(97, generated=False)
    assert sampler.n_draws == 0
    sampler.accept(97)
    assert sampler.n_draws == 1


def test_top_k_of_one_is_greedy(core: Core) -> None:
    context = ready(core)
    best = int(np.argmax(context.logits(0)))
    for seed in range(10):
        assert core.sampler(temperature=1.0, top_k=1, seed=seed).sample(context, 0) == best


def test_a_small_top_p_or_a_large_min_p_is_greedy(core: Core) -> None:
    context = ready(core)
    best = int(np.argmax(context.logits(0)))
    for values in ({"top_p": 1e-6, "min_p": 0.0}, {"top_p": 1.0, "min_p": 1.0}):
        for seed in range(10):
            assert core.sampler(temperature=1.0, top_k=0, seed=seed, **values).sample(context, 0) == best


@pytest.mark.parametrize("name", [
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "infill",
    "logit_bias", "mirostat", "mirostat_v2", "adaptive_p",
])  # fmt: skip
def test_every_sampler_can_stand_alone(core: Core, name: str) -> None:
    by_name: dict[str, dict[str, Any]] = {
        "dry": {"dry_multiplier": 0.8}, "top_n_sigma": {"top_n_sigma": 1.0}, "typical_p": {"typical_p": 0.5},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.01}, "temperature": {"dynatemp_range": 0.5},
        "mirostat": {"mirostat": 1}, "mirostat_v2": {"mirostat": 2}, "adaptive_p": {"adaptive_target": 0.5},
        "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    }  # fmt: skip
    context = ready(core)
    runs = []
    for _ in range(2):
        sampler = core.sampler(order=[name], temperature=0.9, seed=11, **by_name.get(name, {}))
        assert isinstance(sampler.names, list)
        runs.append([sampler.sample(context, 0) for _ in range(8)])
    assert runs[0] == runs[1]


def test_a_grammar_is_enforced_to_its_end(core: Core) -> None:
    vocab = core.model().vocab
    made = core.generate(core.context(), 0, PROMPT, core.sampler(grammar='root ::= "yes!" | "no."'), 8)
    ends = [token for token in made if vocab.is_eog(token)]
    assert vocab.detokenize(made) in (b"yes!", b"no.")
    assert ends


def test_a_grammar_that_admits_nothing_says_so_and_harms_no_other_row(core: Core) -> None:
    context = core.context()
    dead = core.sampler(grammar='root ::= "a"', ignore_eos=True)
    context.step([core.row(0, 0, PROMPT, sampler=dead), core.row(1, 0, PROMPT, sampler=core.sampler())])
    step = context.step([core.row(0, 12, [97], sampler=dead), core.row(1, 12, [97], sampler=core.sampler())])
    assert step.status == "ok"
    assert step.tokens[0] is None
    assert step.errors[0]
    assert step.tokens[1] is not None
    assert step.errors[1] is None


def test_a_grammar_accepts_only_what_it_allows(core: Core) -> None:
    sampler = core.sampler(grammar='root ::= "ab"')
    with pytest.raises(BadGrammar):
        sampler.accept(120)
    with pytest.raises(BadGrammar):
        sampler.accept(core.model().vocab.eos)
    sampler.accept(97)
    sampler.accept(98)
    sampler.accept(core.model().vocab.eos)


def test_a_clone_and_a_reset_know_where_the_grammar_stands(core: Core) -> None:
    context = ready(core)
    sampler = core.sampler(grammar='root ::= "abc"')
    assert sampler.sample(context, 0) == 97
    clone = sampler.clone()
    assert [clone.sample(context, 0), clone.sample(context, 0)] == [98, 99]
    sampler.reset()
    assert sampler.sample(context, 0) == 97


@pytest.mark.parametrize("grammar", ["root ::= (", 'start ::= "a"', "root ::= other", "nonsense", "\0", 'root ::= "a'])
def test_a_broken_grammar_is_refused(core: Core, grammar: str) -> None:
    with pytest.raises(BadGrammar):
        core.sampler(grammar=grammar)


BAD_PARAMS: list[dict[str, Any]] = [
    {"order": ["top_q"]}, {"mirostat": 3}, {"mirostat": -1}, {"min_keep": 0}, {"repeat_penalty": 0.0},
    {"repeat_penalty": -1.0}, {"penalty_last_n": -1}, {"dry_penalty_last_n": -1}, {"logit_bias": [(-1, 1.0)]},
    {"logit_bias": [(1 << 20, 1.0)]}, {"temperature": math.nan}, {"top_p": math.nan}, {"repeat_penalty": math.inf},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD_PARAMS, ids=str)
def test_impossible_parameters_are_refused(core: Core, values: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        core.sampler(**values)


def test_tokens_that_do_not_exist_are_not_accepted(core: Core) -> None:
    for token in (-1, 1 << 20):
        with pytest.raises(BadOption):
            core.sampler().accept(token)


def test_a_row_without_output_cannot_be_sampled(core: Core) -> None:
    with pytest.raises(BadOption):
        core.sampler().sample(core.context(), 0)


def test_log_probabilities_sum_to_one_and_come_in_order(core: Core) -> None:
    n_vocab = core.model().vocab.n_tokens
    context = core.context()
    step = context.step([core.row(0, 0, PROMPT, sampler=core.sampler(), logprobs=n_vocab)])
    top = step.logprobs[0].top
    assert len(top) == n_vocab
    assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-4)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert dict(top)[step.tokens[0]] == pytest.approx(step.logprobs[0].logprob)
    logits = context.logits(0).astype(np.float64)
    expected = logits[step.tokens[0]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert step.logprobs[0].logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n_top", [0, 1, 5, 100_000])
def test_as_many_alternatives_are_reported_as_asked_for(core: Core, n_top: int) -> None:
    step = core.context().step([core.row(0, 0, PROMPT, sampler=core.sampler(), logprobs=n_top)])
    assert len(step.logprobs[0].top) == min(n_top, core.model().vocab.n_tokens)


def test_log_probabilities_are_the_models_whatever_the_sampler_does(core: Core) -> None:
    plain = core.context().step([core.row(0, 0, PROMPT, sampler=core.sampler(), logprobs=3)])
    biased = core.sampler(logit_bias=[(65, 1000.0)])
    other = core.context().step([core.row(0, 0, PROMPT, sampler=biased, logprobs=3)])
    assert other.tokens[0] == 65
    assert other.logprobs[0].top == plain.logprobs[0].top
    assert other.logprobs[0].logprob < 0


OPEN, CLOSE = [ord("("), ord("(")], [ord(")")]
LAST_WORD = [ord("o"), ord("k"), ord(")")]


def thinker(core: Core, **values: Any) -> Any:
    """Return a sampler whose prompt has opened the thinking, and which never ends it by itself."""
    markers = {"reasoning_start": OPEN, "reasoning_ends": [CLOSE], "reasoning_prefill": [1, 2, *OPEN]}
    return core.sampler(**(markers | {"logit_bias": [(CLOSE[0], -math.inf)], "ignore_eos": True} | values))


@pytest.mark.parametrize("options", [{}, WIDE, {"repeat_penalty": 1.5}, {"temperature": 0.9, "top_k": 5}])
def test_when_the_budget_is_spent_the_thinking_is_ended(core: Core, options: dict[str, Any]) -> None:
    sampler = thinker(core, reasoning_budget=5, reasoning_forced=LAST_WORD, **options)
    made = core.generate(core.context(), 0, PROMPT, sampler, 16)
    at = made.index(CLOSE[0]) - 2
    assert made[at : at + 3] == LAST_WORD
    assert 5 <= at <= 8  # a letter of several bytes is written to its end first
    assert CLOSE[0] not in made[at + 3 :]


def test_a_budget_of_nothing_ends_the_thinking_at_once(core: Core) -> None:
    made = core.generate(core.context(), 0, PROMPT, thinker(core, reasoning_budget=0), 4)
    assert made[0] == CLOSE[0]
    assert CLOSE[0] not in made[1:]


def test_without_a_budget_the_thinking_goes_on(core: Core) -> None:
    sampler = thinker(core)
    assert "reasoning_budget" not in sampler.names
    assert CLOSE[0] not in core.generate(core.context(), 0, PROMPT, sampler, 16)


def test_a_model_that_does_not_think_spends_no_budget(core: Core) -> None:
    sampler = thinker(core, reasoning_budget=2, reasoning_prefill=[])
    assert CLOSE[0] not in core.generate(core.context(), 0, PROMPT, sampler, 16)


def test_thinking_that_ends_by_itself_spends_no_more(core: Core) -> None:
    sampler = thinker(core, reasoning_budget=4, reasoning_forced=LAST_WORD)
    for token in (100, 101, *CLOSE, 102, 103, 104, 105):
        sampler.accept(token)
    made = core.generate(core.context(), 0, PROMPT, sampler, 8)
    assert CLOSE[0] not in made
    for token in OPEN:  # a second block has a budget of its own
        sampler.accept(token)
    assert core.generate(core.context(), 0, PROMPT, sampler, 8)[4:7] == LAST_WORD


def test_a_budget_survives_clone_reset_and_resumption(core: Core) -> None:
    sampler = thinker(core, reasoning_budget=5, reasoning_forced=LAST_WORD)
    expected = core.generate(core.context(), 0, PROMPT, sampler, 12)
    sampler.reset()
    assert core.generate(core.context(), 0, PROMPT, sampler, 12) == expected
    for n in range(len(expected)):
        resumed = thinker(core, reasoning_budget=5, reasoning_forced=LAST_WORD)
        resumed.accept_prompt(PROMPT)
        for token in expected[:n]:
            resumed.accept(token)
        twin = resumed.clone()
        for one in (resumed, twin):
            assert core.generate(core.context(), 0, PROMPT + expected[:n], one, 12 - n)[:3] == expected[n:][:3]


def test_markers_are_tokens_of_the_vocabulary(core: Core) -> None:
    for wrong in ({"reasoning_start": [10**9]}, {"reasoning_ends": [[-1]]}, {"reasoning_budget": -2}):
        with pytest.raises(BadOption):
            thinker(core, **({"reasoning_budget": 1} | wrong))


def test_a_lazy_grammar_sleeps_until_its_trigger(core: Core) -> None:
    lazy = {"grammar": 'root ::= "<a>7"', "grammar_lazy": True, "grammar_trigger_patterns": ["<a>"]}
    sampler = core.sampler(**lazy)
    for letter in "free <a>":
        sampler.accept(ord(letter))
    with pytest.raises(BadGrammar):
        sampler.accept(ord("x"))
    sampler.accept(ord("7"))


def test_a_lazy_grammar_does_not_wake_in_a_thought(core: Core) -> None:
    lazy = {"grammar": 'root ::= "<a>7"', "grammar_lazy": True, "grammar_trigger_patterns": ["<a>"]}
    sampler = thinker(core, **lazy)
    assert "reasoning_budget" in sampler.names
    for letter in "so <a>x, or not) <a>":
        sampler.accept(ord(letter))
    with pytest.raises(BadGrammar):
        sampler.accept(ord("x"))
