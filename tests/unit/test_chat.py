"""Chat on the fake core: options, events, calls, thinking, constraints, cancelling, and what is remembered."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir import errors
from kvasir.chat import ChatReply, Done, Text, ToolCallArguments, ToolCallDone, ToolCallStarted
from kvasir.service.chat import ChatOptions, prepare
from kvasir.service.model import Model
from kvasir.types import FinishReason
from tests.unit.test_service import open_fake

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def model() -> Iterator[Model]:
    with open_fake(context_size=2048) as opened:
        yield opened


def test_a_reply_has_all_its_parts(model: Model) -> None:
    reply = model.chat(ASK, max_tokens=12, seed=5, logit_bias={259: -100.0, 261: -100.0})
    assert isinstance(reply, ChatReply)
    assert reply.content
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.seed == 5
    assert reply.usage.prompt_tokens == model.count_tokens(ASK)
    assert reply.usage.completion_tokens == 12
    assert reply.usage.reasoning_tokens == 0
    assert reply.message() == {"role": "assistant", "content": reply.content}


def test_a_stream_gives_the_same_text_in_pieces_and_ends_with_the_reply(model: Model) -> None:
    whole = model.chat(ASK, max_tokens=12, seed=5)
    *pieces, last = model.chat_stream(ASK, max_tokens=12, seed=5)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == whole.content
    assert isinstance(last, Done)
    assert last.reply.content == whole.content
    assert "".join(model.chat_stream(ASK, max_tokens=12, seed=5).text()) == whole.content


def test_awaiting_gives_the_same(model: Model) -> None:
    async def both() -> tuple[ChatReply, str]:
        reply = await model.achat(ASK, max_tokens=12, seed=5)
        pieces = [piece async for piece in model.chat_stream(ASK, max_tokens=12, seed=5).atext()]
        return reply, "".join(pieces)

    reply, text = asyncio.run(both())
    assert reply.content == text == model.chat(ASK, max_tokens=12, seed=5).content


def test_the_next_turn_hits_to_the_last_token(model: Model) -> None:
    first = model.chat(ASK, max_tokens=16, seed=1, ignore_eos=True)
    then = [*ASK, first.message(), {"role": "user", "content": "And another?"}]
    second = model.chat(then, max_tokens=4, seed=1)
    # The last token was sampled and never decoded, so it is the one that is missing.
    assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_a_required_call_streams_its_arguments(model: Model) -> None:
    events = list(model.chat_stream("1+1?", tools=[add], tool_choice="required", max_tokens=200, temperature=0))
    started = next(event for event in events if isinstance(event, ToolCallStarted))
    arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    done = next(event for event in events if isinstance(event, ToolCallDone))
    assert started.name == done.call.name == "add"
    assert started.id == done.call.id
    assert done.call.arguments_json == arguments
    assert isinstance(done.call.arguments, dict)
    assert set(done.call.arguments) == {"a", "b"}
    last = events[-1]
    assert isinstance(last, Done)
    assert last.reply.finish_reason is FinishReason.TOOL_CALLS
    assert last.reply.message()["tool_calls"][0]["function"]["name"] == "add"


def test_tools_are_run_and_the_exchange_comes_back(model: Model) -> None:
    reply = model.run_tools("1+1?", [add], tool_choice="required", max_rounds=1, max_tokens=200, temperature=0)
    roles = [message["role"] for message in reply.messages]
    assert roles[:3] == ["user", "assistant", "tool"]
    assert reply.messages[2]["content"].lstrip("-").isdigit()
    assert reply.messages[2]["tool_call_id"] == reply.messages[1]["tool_calls"][0]["id"]
    # One round and no more: then it must answer.
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert reply.tool_calls == ()


def test_what_a_tool_raises_is_told_to_the_model(model: Model) -> None:
    def fails(a: int) -> int:
        """Fail."""
        raise ValueError("no such thing")

    reply = model.run_tools("1?", [fails], tool_choice="required", max_rounds=1, max_tokens=200, temperature=0)
    assert reply.messages[2]["content"] == '{"error": "ValueError: no such thing"}'


def test_a_tool_that_is_only_described_ends_the_loop(model: Model) -> None:
    described = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    reply = model.run_tools("1?", [described], tool_choice="required", max_tokens=200, temperature=0)
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert len(reply.messages) == 2


def test_async_tools_run_in_asyncio_and_only_there(model: Model) -> None:
    async def later(a: int) -> int:
        """Wait."""
        await asyncio.sleep(0)
        return a

    reply = asyncio.run(
        model.arun_tools("1?", [later], tool_choice="required", max_rounds=1, max_tokens=200, temperature=0)
    )
    assert reply.messages[2]["role"] == "tool"
    with pytest.raises(errors.BadOption, match="use arun_tools"):
        model.run_tools("1?", [later])


def test_tools_work_where_the_template_knows_none(model: Model) -> None:
    options: dict[str, Any] = {"template": PLAIN, "tools": [add], "max_tokens": 200, "temperature": 0}
    reply = model.chat("1+1?", tool_choice="add", **options)
    assert [call.name for call in reply.tool_calls] == ["add"]
    assert reply.content == ""
    assert "# Tools" in model.render("1+1?", tools=[add], template=PLAIN)


@pytest.mark.parametrize(
    ("constraint", "parsed"),
    [
        ({"choices": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ],
)
def test_an_answer_follows_its_constraint_over_two_turns(
    model: Model, constraint: dict[str, Any], parsed: set[str]
) -> None:
    first = model.chat(ASK, max_tokens=20, seed=2, enable_thinking=False, **constraint)
    assert first.parsed in parsed
    assert first.content == first.parsed
    again = [*ASK, first.message(), {"role": "user", "content": "Sure?"}]
    assert model.chat_stream(again, max_tokens=20, enable_thinking=False, **constraint).result().parsed in parsed


def test_a_schema_gives_an_object_and_a_cut_answer_none(model: Model) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for given in (
        {"json_schema": schema},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        reply = model.chat(ASK, max_tokens=60, temperature=0, enable_thinking=False, **given)
        assert reply.parsed in ({"n": 1}, {"n": 2})
    cut = model.chat(ASK, max_tokens=2, temperature=0, enable_thinking=False, json_schema=schema)
    assert cut.parsed is None
    assert cut.finish_reason is FinishReason.LENGTH


def test_a_cancelled_reply_is_what_came(model: Model) -> None:
    stream = model.chat_stream(ASK, max_tokens=1500, seed=1, ignore_eos=True)
    first = next(stream)
    assert isinstance(first, Text)
    stream.cancel()
    reply = stream.result()
    assert reply.finish_reason is FinishReason.CANCELLED
    assert reply.content.startswith(first.text)
    assert len(reply.content) < 1500


def test_leaving_the_loop_cancels_and_frees_the_slot(model: Model) -> None:
    for _ in model.chat_stream(ASK, max_tokens=1500, seed=1, ignore_eos=True):
        break
    gc.collect()
    waited = threading.Event()
    for _ in range(200):
        if model.stats().slots_used - model.stats().slots_parked <= 0:
            break
        waited.wait(0.01)
    assert model.stats().requests_open == 0


def test_a_stop_string_ends_the_reply(model: Model) -> None:
    text = model.chat(ASK, max_tokens=30, seed=1, ignore_eos=True).content
    stop = text[10:13]
    reply = model.chat(ASK, max_tokens=30, seed=1, ignore_eos=True, stop=stop)
    assert reply.content == text[: text.index(stop)]
    assert (reply.finish_reason, reply.stop) == (FinishReason.STOP, stop)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tool": [add]}, "unknown option 'tool'. Did you mean 'tools'"),
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"enable_thinking": "no"}, "enable_thinking must be True or False"),
        ({"tool_choice": "required"}, "no tools were given"),
        ({"tools": [add], "tool_choice": "ad"}, "Did you mean 'add'"),
        ({"tools": [add], "choices": ["a"]}, "tools and a constraint"),
        ({"choices": ["a"], "regex": "b"}, "together"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"template_kwargs": {"x": object()}}, "is no JSON"),
        ({"template": "{% if %"}, "template"),
    ],
)
def test_what_cannot_be_is_refused(model: Model, options: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.BadRequest, match=why):
        model.chat(ASK, **options)


def test_an_unfinished_message_is_continued(model: Model) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The river"}]
    assert model.render(begun, continue_final=True).endswith("The river")
    reply = model.chat(begun, continue_final=True, max_tokens=4, seed=1)
    assert not reply.content.startswith("The river")


def test_a_prompt_may_end_with_its_last_message(model: Model) -> None:
    with_prompt = prepare(model, ASK, ChatOptions()).text
    without = prepare(model, ASK, ChatOptions(), add_generation_prompt=False).text
    assert with_prompt.startswith(without)
    assert len(without) < len(with_prompt)


def test_options_say_their_tools_as_plain_data() -> None:
    options = ChatOptions.of(tools=[add])
    assert options.tool_schemas()[0]["function"]["name"] == "add"
    assert ChatOptions.of(tools=options.tool_schemas()).tool_schemas() == options.tool_schemas()


# What is kept of a system prompt

BRIEF = {"role": "system", "content": "Be brief, and never speak of anything that is not a river."}
LONG = "and what else is there to say about it, in the end? "


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
@pytest.mark.parametrize("tools", [None, [add]])
def test_what_cannot_rewind_begins_at_the_end_of_a_system_prompt_it_knows(
    kind: str, tools: list[Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"fake:{kind}").write_text(kind)  # only files are cached
    asked: dict[str, Any] = {"tools": tools, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    one, other = ([BRIEF, {"role": "user", "content": text + LONG * 20}] for text in ("Name one, ", "Name two, "))
    with open_fake(kind, context_size=8192, slots=2, cache_dir=tmp_path / "kv") as model:
        n_shared = len(model.tokenize(model.render(other, tools=tools).split("Name two")[0] + "Name "))
        assert model.chat(one, **asked).usage.cached_tokens == 0
        reply = model.chat(other, **asked)
        plain = model.chat(other, cache=False, **asked)
    assert n_shared - len("Name ") - 1 <= reply.usage.cached_tokens < n_shared
    assert plain.usage.cached_tokens == 0
    assert reply.content == plain.content


def test_only_what_cannot_rewind_is_asked_where_a_system_prompt_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a rendering."""
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    submit = Model._submit

    def watched(model: Model, request: Any, reply: Any) -> Any:
        seen.append(request)
        return submit(model, request, reply)

    monkeypatch.setattr(Model, "_submit", watched)
    for kind in ("plain", "window", "recurrent", "hybrid"):
        Path(f"fake:{kind}").write_text(kind)
        with open_fake(kind, context_size=2048, cache_dir=tmp_path / "kv") as model:
            model.chat([BRIEF, {"role": "user", "content": "Hello"}], max_tokens=2)
            model.chat("Hello", max_tokens=2)
    assert [request.checkpoint is not None for request in seen] == [False] * 4 + [True, False] * 2
