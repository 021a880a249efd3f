"""Chat on the real core: mechanics on a tiny model of random weights, sense on the default one."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pydantic
import pytest

import kvasir
from kvasir.chat import Done, Reasoning, Text, ToolCallDone
from kvasir.errors import KvasirError
from tests.models_e2e.fetch import chatting

# Opens the thinking itself, knows no tools; specials that every test vocabulary has are not needed.
THINKS = (
    "{% for message in messages %}{{ '[' + message.role + ']' }}"
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]<think>\\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "You are helpful."}
SKY = [SYSTEM, {"role": "user", "content": "Is the sky blue?"}]


def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather of a city.

    city: its name
    """
    return f"21 {unit} in {city}"


def test_a_prompt_is_counted_as_it_is_read(model: kvasir.Model) -> None:
    reply = model.chat(SKY, template=CHATML, max_tokens=1, temperature=0)
    assert reply.usage.prompt_tokens == model.count_tokens(SKY, template=CHATML)
    assert "Is the sky blue?" in model.render(SKY, template=CHATML)


def test_turns_hit_to_the_last_token(model: kvasir.Model) -> None:
    options: dict[str, Any] = {"template": CHATML, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    messages = [{"role": "user", "content": "Turns hit to the last token, whatever was said."}]
    for _ in range(3):
        first = model.chat(messages, **options)
        messages += [first.message(), {"role": "user", "content": "Go on."}]
        second = model.chat(messages, **options)
        sampled = first.usage.prompt_tokens + first.usage.completion_tokens
        assert second.usage.cached_tokens >= sampled - 1
        messages += [second.message(), {"role": "user", "content": "And on."}]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thinking_ends_when_its_budget_is_spent(model: kvasir.Model, budget: int) -> None:
    options: dict[str, Any] = {"template": THINKS, "max_tokens": budget + 40, "seed": 4, "ignore_eos": True}
    events = list(model.chat_stream(SKY, thinking_budget=budget, **options))
    done = events[-1]
    assert isinstance(done, Done)
    end = len(model.tokenize("</think>", add_special=False))
    # A character that takes several tokens may be finished first.
    assert done.reply.usage.reasoning_tokens <= budget + end + 4
    assert done.reply.content
    assert "</think>" not in done.reply.content
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    assert thought == done.reply.reasoning


def test_thinking_that_is_off_is_off_also_where_the_template_opens_it(model: kvasir.Model) -> None:
    reply = model.chat(SKY, template=THINKS, enable_thinking=False, max_tokens=30, seed=4, ignore_eos=True)
    assert reply.reasoning == ""
    assert reply.content


def test_an_answer_after_thinking_follows_its_constraint(model: kvasir.Model) -> None:
    options: dict[str, Any] = {"template": THINKS, "thinking_budget": 6, "max_tokens": 80, "seed": 4}
    reply = model.chat(SKY, choices=["yes", "no"], **options)
    assert reply.parsed in ("yes", "no")
    assert reply.reasoning


@pytest.mark.parametrize("choice", ["required", "pick", {"type": "function", "function": {"name": "pick"}}], ids=str)
def test_a_call_that_is_required_is_made_and_its_arguments_fit(model: kvasir.Model, choice: Any) -> None:
    # Random weights may never close a string by themselves, so this one is short.
    def pick(colour: Literal["red", "green"], n: Literal[1, 2]) -> str:
        """Pick."""
        return colour * n

    tools = [pick] if choice == "required" else [weather, pick]
    reply = model.chat("Pick one.", template=CHATML, tools=tools, tool_choice=choice, max_tokens=120, seed=3)
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.tool_calls
    assert call.name == "pick"
    assert isinstance(call.arguments, dict)
    assert call.arguments["colour"] in ("red", "green")
    assert call.arguments["n"] in (1, 2)
    assert reply.content == ""


def test_a_required_call_over_thinking(model: kvasir.Model) -> None:
    def pick(n: Literal[1, 2]) -> int:
        """Pick."""
        return n

    reply = model.chat(
        "Pick.", template=THINKS, tools=[pick], tool_choice="required", thinking_budget=4, max_tokens=120, seed=3
    )
    assert [call.name for call in reply.tool_calls] == ["pick"]
    assert reply.usage.reasoning_tokens > 0


def test_a_reply_stops_at_its_length_at_a_stop_string_and_when_it_is_cancelled(model: kvasir.Model) -> None:
    options: dict[str, Any] = {"template": CHATML, "temperature": 0, "ignore_eos": True}
    whole = model.chat(SKY, max_tokens=30, **options)
    assert whole.finish_reason == "length"
    stop = whole.content[5:8]
    stopped = model.chat(SKY, max_tokens=30, stop=[stop], **options)
    assert stopped.content == whole.content[: whole.content.index(stop)]
    assert stopped.finish_reason == "stop"
    stream = model.chat_stream(SKY, max_tokens=400, **options)
    assert isinstance(next(stream), Text)
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"


def test_many_chats_run_at_once(model: kvasir.Model) -> None:
    async def together() -> list[kvasir.ChatReply]:
        asked = [f"Question {i}?" for i in range(6)]
        options: dict[str, Any] = {"template": CHATML, "max_tokens": 12, "ignore_eos": True}
        return await asyncio.gather(*(model.achat(text, **options) for text in asked))

    assert [reply.usage.completion_tokens for reply in asyncio.run(together())] == [12] * 6


@pytest.mark.models
class TestSense:
    """What needs a model that brings a template, and most of it one that learned something."""

    @pytest.fixture(autouse=True)
    def template(self, real_path: Path) -> None:
        """Skips them all where the model brings none."""
        chatting(real_path)

    def test_it_answers(self, sensible: kvasir.Model, is_default: bool) -> None:
        # Worded so that SmolLM2 is sure of each token by 1.7 or more: other wordings meet ties, which rounding decides.
        system = {"role": "system", "content": "You are a helpful assistant."}
        asked = {"role": "user", "content": "Name the capital of France."}
        reply = sensible.chat([system, asked], temperature=0, max_tokens=40)
        assert reply.finish_reason == "stop"
        if is_default:
            assert "Paris" in reply.content

    def test_a_call_through_our_own_form(self, sensible: kvasir.Model) -> None:
        asked = "What is the weather in Oslo?"
        options: dict[str, Any] = {"tool_choice": "required", "temperature": 0, "max_tokens": 100}
        events = list(sensible.chat_stream(asked, tools=[weather], **options))
        (done,) = [event for event in events if isinstance(event, ToolCallDone)]
        assert done.call.arguments == json.loads(done.call.arguments_json)
        assert "Oslo" in str(done.call.arguments)

    def test_tools_are_run(self, sensible: kvasir.Model) -> None:
        reply = sensible.run_tools(
            "What is the weather in Oslo?",
            [weather],
            tool_choice="required",
            temperature=0,
            max_tokens=60,
            max_rounds=2,
        )
        assert reply.messages[2]["role"] == "tool"
        assert "21" in reply.messages[2]["content"]

    def test_structured_answers_over_two_turns_and_streamed(self, sensible: kvasir.Model) -> None:
        class City(pydantic.BaseModel):
            name: str
            large: bool

        messages = [SYSTEM, {"role": "user", "content": "Describe Paris."}]
        first = sensible.chat(messages, json_schema=City, temperature=0, max_tokens=60)
        assert isinstance(first.parsed, City)
        messages += [first.message(), {"role": "user", "content": "And London."}]
        stream = sensible.chat_stream(messages, json_schema=City.model_json_schema(), temperature=0, max_tokens=60)
        text = "".join(stream.text())
        parsed = stream.result().parsed
        assert json.loads(text) == parsed
        jsonschema.validate(parsed, City.model_json_schema())

    def test_regular_expressions_and_choices(self, real: kvasir.Model) -> None:
        date = real.chat([SYSTEM, {"role": "user", "content": "A date?"}], regex="[0-9]{4}-[01][0-9]", temperature=0)
        assert re.fullmatch("[0-9]{4}-[01][0-9]", date.parsed)
        assert real.chat(SKY, choices=["yes", "no"], temperature=0).parsed in ("yes", "no")

    def test_an_unsupported_part_is_refused_and_the_model_goes_on(self, real: kvasir.Model) -> None:
        with pytest.raises(KvasirError):
            real.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert real.chat(SKY, max_tokens=3).usage.completion_tokens
