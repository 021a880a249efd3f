"""Templates on the fake core: who spells the tools, what constrains the reply, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.chat import grammars, hermes
from kvasir.chat.events import Event, Reasoning, Text, ToolCallArguments, ToolCallDone, ToolCallStarted
from kvasir.chat.messages import normalise
from kvasir.chat.parser import ReplyParser
from kvasir.chat.prompt import Rendered, Template, template_source
from kvasir.chat.tools import offer, toolset
from kvasir.errors import BadOption, Unsupported
from kvasir.native import fake
from kvasir.native.fake_grammar import Grammar

PLAIN = "{% for message in messages %}{{ message.role }}{% endfor %}"
ASK = normalise("How warm is Oslo?")


def weather(city: str) -> str:
    """Tell the weather."""
    return f"21 C in {city}"


TOOLS = toolset([weather])


def own() -> Template:
    return Template(fake, fake.Model.load("fake:plain"))


def follows(grammar: str, text: str) -> bool:
    """Whether the grammar admits exactly this text."""
    state = Grammar(grammar, "root").after(text.encode())
    return state is not None and state.may_end


def read(rendered: Rendered, text: str, n: int = 1) -> tuple[ReplyParser, list[Event]]:
    parser = ReplyParser(fake, rendered)
    events = [event for i in range(0, len(text), n) for event in parser.feed(text[i : i + n])]
    return parser, events + parser.finish()


def test_a_template_that_knows_tools_spells_them_itself() -> None:
    rendered = own().render(ASK, offer(TOOLS, "auto"))
    assert not rendered.ours
    assert '"name": "weather"' in rendered.text
    assert rendered.grammar is None


def test_a_template_without_tools_gets_ours() -> None:
    rendered = Template(fake, source=PLAIN).render(ASK, offer(TOOLS, "auto"))
    assert rendered.ours
    assert rendered.wakes_on == "<tool_call>"
    assert "# Tools" in rendered.text
    assert '"name": "weather"' in rendered.text


def test_none_says_nothing_of_tools() -> None:
    rendered = Template(fake, source=PLAIN).render(ASK, offer(TOOLS, "none"))
    assert "weather" not in rendered.text
    assert rendered.tools == ()


def test_a_required_call_of_ours_is_constrained_from_the_start() -> None:
    rendered = Template(fake, source=PLAIN).render(ASK, offer(TOOLS, "required"))
    assert rendered.grammar is not None
    assert rendered.wakes_on == ""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert follows(rendered.grammar, call)
    assert not follows(rendered.grammar, "It is warm.")
    assert not follows(rendered.grammar, call.replace("city", "town"))
    assert not follows(rendered.grammar, call + call)


def test_past_calls_and_results_are_written_out_where_the_template_knows_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    past = [*ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "21 C"},
            {"role": "tool", "tool_call_id": "1", "content": "sun"}]  # fmt: skip
    spelled = hermes.spell(normalise(past))
    assert [message["role"] for message in spelled] == ["user", "assistant", "user"]
    assert spelled[1]["content"].startswith('I look.\n<tool_call>\n{"name": "weather"')
    assert spelled[2]["content"].count("<tool_response>") == 2


def test_tools_are_told_after_the_system_prompt() -> None:
    told = hermes.describe(normalise([{"role": "system", "content": "Be brief."}, *ASK]), TOOLS, required=False)
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert len(told) == 2


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    bare = fake.Model.load("fake:plain?template=0")
    with pytest.raises(Unsupported, match="template="):
        Template(fake, bare).render(ASK)


def test_a_template_is_text_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN)
    assert template_source(tmp_path / "own.jinja") == template_source(PLAIN) == PLAIN
    assert template_source(None) == ""
    with pytest.raises(BadOption, match="cannot be read"):
        template_source(tmp_path / "none.jinja")
    with pytest.raises(BadOption, match=r"pathlib\.Path"):
        template_source("own.jinja")


def test_only_the_assistants_last_message_is_continued() -> None:
    with pytest.raises(BadOption, match="continue_final"):
        own().render(ASK, continue_final=True)


def test_what_follows_thinking_obeys_the_grammar() -> None:
    wrapped = grammars.after_thinking('root ::= "yes" | "no"', start="<think>", ends=("</think>",), opened=True)
    assert follows(wrapped, "I < </thin </think>\n\nyes")
    assert not follows(wrapped, "yes")
    free = grammars.after_thinking('root ::= "yes" | "no"', start="<think>", ends=("</think>",), opened=False)
    assert follows(free, "yes")
    assert follows(free, "<think>hm</think> no")
    assert not follows(free, "<think>hm</think> maybe")


def test_prose_before_a_required_call_is_taken_out() -> None:
    grammar = (
        'root ::= "<a>" space ("<think>" until-13 "</think>")? until-18? tool-calls\ntool-calls ::= (tool-call space)+'
    )
    assert grammars.without_prose(grammar).splitlines()[0].endswith('"</think>")? tool-calls')
    assert grammars.only_one_call(grammar).splitlines()[1] == "tool-calls ::= (tool-call space)"


def test_a_reply_becomes_events() -> None:
    rendered = own().render(ASK, offer(TOOLS, "auto"))
    text = (
        '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    parser, events = read(rendered, text)
    assert (parser.reasoning, parser.content) == ("hm", "I look.")
    (call,) = parser.tool_calls
    assert (call.name, call.arguments) == ("weather", {"city": "Oslo"})
    kinds = list(dict.fromkeys(type(event) for event in events))
    assert kinds == [Reasoning, Text, ToolCallStarted, ToolCallArguments, ToolCallDone]
    pieces = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
    assert json.loads(pieces) == call.arguments
    assert events[-1] == ToolCallDone(0, call)


@pytest.mark.parametrize("n", [1, 5, 1000])
def test_a_fence_is_a_call_also_where_the_template_has_a_form_of_its_own(n: int) -> None:
    rendered = own().render(ASK, offer(TOOLS, "auto"))
    fenced = 'Sure.\n```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```'
    parser, _ = read(rendered, fenced, n)
    assert [call.name for call in parser.tool_calls] == ["weather"]
    assert parser.content == "Sure.\n"


def test_a_call_nobody_understands_is_content() -> None:
    rendered = own().render(ASK, offer(TOOLS, "auto"))
    text = "<tool_call>weather(Oslo)</tool_call> or so"
    parser, _ = read(rendered, text)
    assert parser.content == text
    assert parser.tool_calls == ()


def test_without_tools_nothing_is_looked_for() -> None:
    parser, _ = read(own().render(ASK), '{"name": "weather", "arguments": {}}')
    assert parser.content == '{"name": "weather", "arguments": {}}'
