"""What only real weights can show: replies that hang together and windows that slide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvasir
from tests.models_e2e.table import RealModel

pytestmark = [pytest.mark.models, pytest.mark.timeout(3600)]

STORY = "The old ship left the harbour in the morning, and nobody on board knew where the captain wanted to go. "


# Flash attention on a CPU sums in half precision, in the order of the cells: where a sequence's later tokens lie before
# its prompt, plain llama.cpp moves log probabilities of SmolLM2 (Q4_1, unified cells, one thread) by up to 0.34, and
# by nothing where the order is the same. Two tokens nearer than that are a tie that either may win.
TIE = 0.35


def greedy(model: kvasir.Model, prompt: str | list[int], n: int = 16) -> kvasir.Completion:
    return model.generate(prompt, temperature=0, ignore_eos=True, max_tokens=n, logprobs=2)


def assert_same(one: kvasir.Completion, other: kvasir.Completion, *, skip: int = 0) -> None:
    """`one` is `other` from `skip` on, as far as both go; they may part only at a tie."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    for came, want in zip(one.logprobs, other.logprobs[skip:], strict=False):
        if came.token != want.token:
            assert min(came.top[0][2] - came.top[1][2], want.top[0][2] - want.top[1][2]) < TIE
            return


def test_it_knows_what_it_should(sensible: kvasir.Model, real_model: RealModel) -> None:
    text = greedy(sensible, "The capital of France is").text
    assert text.strip()
    assert real_model.knows in text


def test_a_second_time_gives_the_same_reply(model: kvasir.Model) -> None:
    """The second may find the prompt in memory; the reply must not tell."""
    prompt = STORY * 4
    first, second = greedy(model, prompt), greedy(model, prompt)
    assert_same(first, second)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.cached_tokens < second.usage.prompt_tokens


def test_a_reply_goes_on_where_it_was_cut(model: kvasir.Model) -> None:
    prompt = model.tokenize(STORY)
    whole, head = greedy(model, prompt, 24), greedy(model, prompt, 8)
    assert_same(head, whole)
    rest = greedy(model, [*prompt, *whole.tokens[:8]], 16)
    assert_same(rest, whole, skip=8)


def test_it_goes_on_with_what_it_has_read(sensible: kvasir.Model) -> None:
    story = sensible.tokenize(STORY, add_special=False)
    begun = [*sensible.tokenize(""), *story * 4, *story[:10]]
    assert greedy(sensible, begun, 6).tokens == tuple(story[10:16])


def test_a_schema_holds_over_several_fields(model: kvasir.Model) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "rainy": {"type": "boolean"},
            "months": {"type": "array", "items": {"enum": ["May", "June", "July"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["city", "rainy", "months"],
        "additionalProperties": False,
    }
    completion = model.generate(
        "A city with its weather, as JSON:\n", json_schema=schema, max_tokens=300, temperature=0
    )
    assert completion.parsed == json.loads(completion.text)
    assert set(completion.parsed) == {"city", "rainy", "months"}


def test_a_word_stops_the_text(sensible: kvasir.Model) -> None:
    completion = sensible.generate("One, two, three, four,", temperature=0, max_tokens=200, stop=[",", ".", "\n", " "])
    assert completion.finish_reason == "stop"
    assert not set(completion.text) & set(",.\n ")


@pytest.fixture(scope="module")
def long_model(real_path: Path) -> Iterator[kvasir.Model]:
    with kvasir.load(real_path, context_size=2048, slots=2) as opened:
        yield opened


def test_a_prompt_beyond_the_window_is_served_exactly(long_model: kvasir.Model, real_model: RealModel) -> None:
    """Twice the window and on: the reply is the same whether the prompt came at once, again, or after another."""
    n = min(max(real_model.window * 2, 600) + 40, long_model.info.n_ctx_train - 32)
    prompt = (long_model.tokenize(STORY * 60))[:n]
    assert len(prompt) == n
    first = greedy(long_model, prompt)
    assert_same(greedy(long_model, prompt), first)
    greedy(long_model, prompt[: n // 2], 4)
    assert_same(greedy(long_model, prompt), first)


def test_text_is_remembered_from_beyond_the_window(long_model: kvasir.Model, real_model: RealModel) -> None:
    """Generation runs past the window, not only the prompt."""
    n = min(max(real_model.window, 100) + 60, long_model.info.n_ctx_train - 64)
    assert len(greedy(long_model, STORY, n).tokens) == n
