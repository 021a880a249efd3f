"""Tool calls end to end on Qwen2.5-Coder-1.5B, which learned them, and likes to write them into a code fence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

import kvasir
from kvasir.chat import ToolCallDone, ToolCallStarted
from tests.models_e2e.fetch import file_of
from tests.models_e2e.table import MODELS, chosen

(QWEN,) = [line for line in MODELS if line.name == "qwen2.5-coder-1.5b"]

# The first test may fetch the model.
pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(QWEN not in chosen(), reason=f"KVASIR_TEST_MODEL names another model than {QWEN}"),
]

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
WEATHER = [SYSTEM, {"role": "user", "content": "What is the weather in Oslo right now?"}]


@pytest.fixture(scope="module")
def qwen() -> Iterator[kvasir.Model]:
    with kvasir.load(file_of(QWEN), context_size=4096) as opened:
        yield opened


class Station:
    """A weather station that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def get_weather(self, city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, object]:
        """Get the current weather of a city.

        Args:
            city: the name of the city
            unit: the unit of the temperature
        """
        self.asked.append((city, unit))
        return {"city": city, "temperature": 17, "sky": "heavy snow"}


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_a_tool_is_called_and_its_result_is_told(qwen: kvasir.Model, choice: str) -> None:
    station = Station()
    # A model of this size calls again and again, so it has one round.
    reply = qwen.run_tools(
        WEATHER, [station.get_weather], tool_choice=choice, max_rounds=1, temperature=0, max_tokens=80
    )
    assert station.asked
    assert station.asked[0][0].startswith("Oslo")
    roles = [message["role"] for message in reply.messages]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    assert reply.finish_reason == "stop"
    assert not reply.tool_calls
    assert "17" in reply.content or "snow" in reply.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_comes_as_events(qwen: kvasir.Model, choice: str) -> None:
    events = list(
        qwen.chat_stream(WEATHER, tools=[Station().get_weather], tool_choice=choice, temperature=0, max_tokens=80)
    )
    started = [event for event in events if isinstance(event, ToolCallStarted)]
    done = [event for event in events if isinstance(event, ToolCallDone)]
    assert [event.name for event in started] == ["get_weather"]
    assert isinstance(done[0].call.arguments, dict)
    assert done[0].call.arguments["city"].startswith("Oslo")


def test_a_question_that_needs_no_tool_is_answered(qwen: kvasir.Model) -> None:
    station = Station()
    asked = {"role": "user", "content": "What is 2 + 2? Answer with the number alone."}
    reply = qwen.run_tools([SYSTEM, asked], [station.get_weather], temperature=0, max_tokens=80)
    assert station.asked == []
    assert reply.finish_reason == "stop"
    assert "4" in reply.content


def test_a_tool_that_the_model_invents_is_no_call(qwen: kvasir.Model) -> None:
    # Asked this, it writes a call of "say_hello", which nobody offered; that stays text.
    station = Station()
    asked = {"role": "user", "content": "Say hello to me in French."}
    reply = qwen.run_tools([SYSTEM, asked], [station.get_weather], temperature=0, max_tokens=80)
    assert station.asked == []
    assert reply.tool_calls == ()
    assert reply.finish_reason == "stop"
    assert reply.content


def test_a_tool_that_must_not_be_called_is_not(qwen: kvasir.Model) -> None:
    reply = qwen.chat(WEATHER, tools=[Station().get_weather], tool_choice="none", temperature=0, max_tokens=60)
    assert reply.tool_calls == ()
    assert reply.content
