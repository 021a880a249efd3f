"""Messages to a prompt, a reply to its parts: one template on both cores, and every way to cut a text in pieces."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from kvasir import errors
from kvasir.native.fake_model import TEMPLATE
from tests.contract.core import Core

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = json.dumps([TOOL])
USER = {"role": "user", "content": "How is the weather?"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "rain"},
]
SPELLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def template(core: Core) -> Any:
    return core.native.ChatTemplate(source=TEMPLATE)


def render(core: Core, messages: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    return template(core).render(json.dumps(messages or [USER]), **options)


def read(core: Core, prompt: Any, text: str, *, n: int = 1, continues: bool = False) -> dict[str, Any]:
    """Feed a reply `n` characters at a time, and check that the deltas add up to what the parser says."""
    parser = core.native.ChatParser(prompt, continues=continues)
    deltas = [delta for at in range(0, len(text), n) for delta in parser.feed(text[at : at + n])]
    deltas += parser.finish()
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        assert delta.kind in ("content", "reasoning", "tool_call")
        if delta.kind == "tool_call":
            call = calls.setdefault(delta.index, {"id": delta.id, "name": delta.name, "arguments": ""})
            assert call["id"] == delta.id
            call["arguments"] += delta.text
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == parser.content
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == parser.reasoning
    assert [(c["id"], c["name"], c["arguments"]) for c in calls.values()] == parser.tool_calls
    return {
        "content": parser.content, "reasoning": parser.reasoning,
        "calls": [(name, json.loads(arguments)) for _, name, arguments in parser.tool_calls],
        "rejected": parser.rejected,
    }  # fmt: skip


def plain(content: str = "", reasoning: str = "", *, rejected: bool = False) -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": [], "rejected": rejected}


def test_both_cores_render_the_same_prompt(core: Core) -> None:
    prompt = render(core, HISTORY, tools=TOOLS).prompt
    assert prompt == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n" + json.dumps(TOOL) + "\n</tools><|im_end|>\n"
        "<|im_start|>user\nHow is the weather?<|im_end|>\n"
        f"<|im_start|>assistant\n{SPELLED}<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_model_brings_its_template(core: Core) -> None:
    model = core.model()
    own = core.native.ChatTemplate(model)
    assert own.explicit
    assert own.source == model.chat_template()
    assert own.render(json.dumps([USER])).prompt.endswith("<|im_start|>assistant\n")


def test_a_given_source_wins_over_the_models(core: Core) -> None:
    given = core.native.ChatTemplate(core.model(), TEMPLATE)
    assert given.source == TEMPLATE
    assert given.explicit
    assert given.caps["supports_tools"]


def test_without_model_and_source_there_is_no_template(core: Core) -> None:
    with pytest.raises(errors.BadOption, match="model or a source"):
        core.native.ChatTemplate()


def test_a_template_outlives_its_model(core: Core) -> None:
    model = core.native.Model.load(core.paths["plain"])
    own = core.native.ChatTemplate(model)
    model.close()
    assert own.render(json.dumps([USER])).prompt
    with pytest.raises(errors.Closed):
        core.native.ChatTemplate(model)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% if x %}"])
def test_a_template_that_does_not_parse_is_refused(core: Core, source: str) -> None:
    if core.is_fake and source.count("{%") == source.count("%}") and "{{" not in source:
        source = "{% for"
    with pytest.raises(errors.BadOption, match="not valid Jinja"):
        core.native.ChatTemplate(source=source)


def test_the_caps_tell_what_a_template_shows(core: Core) -> None:
    caps = template(core).caps
    assert set(caps) == {
        "supports_string_content", "supports_typed_content", "supports_tools", "supports_tool_calls",
        "supports_parallel_tool_calls", "supports_system_role", "supports_preserve_reasoning",
        "supports_reasoning_effort", "supports_object_arguments",
    }  # fmt: skip
    assert caps["supports_tools"]
    assert caps["supports_tool_calls"]


def test_thinking_can_be_turned_off(core: Core) -> None:
    assert render(core).supports_thinking
    assert render(core).thinking_start == "<think>"
    assert render(core).thinking_ends == ["</think>"]
    off = render(core, enable_thinking=False)
    assert off.prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert read(core, off, "Rain.") == plain("Rain.")


def test_an_argument_of_the_template_is_json(core: Core) -> None:
    assert render(core, kwargs={"enable_thinking": "false"}).prompt == render(core, enable_thinking=False).prompt
    with pytest.raises(errors.BadOption, match="JSON"):
        render(core, kwargs={"enable_thinking": "{"})


def test_without_a_generation_prompt_the_messages_stand_alone(core: Core) -> None:
    assert render(core, add_generation_prompt=False).prompt.endswith("<|im_end|>\n")


def test_content_parts_become_text(core: Core) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render(core, [{"role": "user", "content": parts}]).prompt


@pytest.mark.parametrize(
    "messages",
    [
        "", "{", "{}", "[1]", '[{"role": "user"}]', '[{"content": "x"}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    ],
)  # fmt: skip
def test_messages_of_another_shape_are_refused(core: Core, messages: str) -> None:
    with pytest.raises(errors.BadOption):
        template(core).render(messages)


@pytest.mark.parametrize(
    "tools", ["{", "{}", "[1]", '[{"type": "function"}]', '[{"type": "function", "function": {}}]']
)
def test_tools_of_another_shape_are_refused(core: Core, tools: str) -> None:
    with pytest.raises(errors.BadOption):
        render(core, tools=tools)


def test_a_tool_choice_is_one_of_three(core: Core) -> None:
    with pytest.raises(errors.BadOption, match="none, auto, required"):
        render(core, tools=TOOLS, tool_choice="weather")


def test_a_schema_that_cannot_be_enforced_is_a_bad_schema(core: Core) -> None:
    with pytest.raises(errors.BadSchema):
        render(core, json_schema='{"type": "no such type"}')
    bad = {"type": "function", "function": {"name": "weather", "parameters": {"type": "no such type"}}}
    with pytest.raises(errors.BadSchema, match="weather"):
        render(core, tools=json.dumps([bad]), tool_choice="required")


def test_a_choice_decides_what_the_grammar_demands(core: Core) -> None:
    auto, required, none = (render(core, tools=TOOLS, tool_choice=c) for c in ("auto", "required", "none"))
    assert auto.grammar
    assert auto.grammar_lazy
    assert [kind for kind, _, _ in auto.grammar_triggers] == ["word"]
    assert required.grammar
    assert not required.grammar_lazy
    assert not none.grammar
    schema = render(core, json_schema='{"type": "object", "properties": {"n": {"type": "integer"}}}')
    assert schema.grammar
    assert not schema.grammar_lazy


REPLIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Rain, and more rain.", plain("Rain, and more rain.")),
    "emoji": ("Ja 🌧 — så.", plain("Ja 🌧 — så.")),
    "stray signs": ("a </p> b { c [ d < e ``` f", plain("a </p> b { c [ d < e ``` f")),
    "half a marker": ("so <tool_c", plain("so <tool_c")),
    "a marker begun": ("a <tool b", plain("a <tool b")),
    "thought": ("<think>\nhm </p> {\n</think>\n\nRain.", plain("Rain.", "hm </p> {")),
    "thought alone": ("<think>\nhm", plain(reasoning="hm")),
    "thought cut in its end": ("<think>\nhm</thi", plain(reasoning="hm</thi")),
    "call": (SPELLED, plain() | {"calls": [("weather", {"city": "Oslo"})]}),
    "text and call": (f"Let me see.{SPELLED}", plain("Let me see.") | {"calls": [("weather", {"city": "Oslo"})]}),
    "thought and call": (
        f"<think>\nask\n</think>\n\n{SPELLED}",
        plain(reasoning="ask") | {"calls": [("weather", {"city": "Oslo"})]},
    ),
    "escapes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "\\u00c5s \\"x\\" </p> {"}}\n</tool_call>',
        plain() | {"calls": [("weather", {"city": 'Ås "x" </p> {'})]},
    ),
    "no such call": ("a <tool_call>\nnonsense\n</tool_call> b", plain(rejected=True)),
}


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_has_the_same_parts_however_it_is_cut(core: Core, name: str, n: int) -> None:
    text, expected = REPLIES[name]
    if name == "no such call":
        expected = expected | {"content": text}
    assert read(core, render(core, tools=TOOLS), text, n=n) == expected


def test_two_calls_have_two_ids(core: Core) -> None:
    prompt = render(core, tools=TOOLS, parallel_tool_calls=True)
    parser = core.native.ChatParser(prompt)
    parser.feed(f"{SPELLED}\n{SPELLED}")
    parser.finish()
    first, second = parser.tool_calls
    assert first[1:] == second[1:] == ("weather", '{"city": "Oslo"}')
    assert first[0] != second[0]
    assert all(len(id_) == 9 and id_.isalnum() for id_ in (first[0], second[0]))


def test_arguments_come_as_they_are_written(core: Core) -> None:
    parser = core.native.ChatParser(render(core, tools=TOOLS))
    deltas = [delta for letter in SPELLED for delta in parser.feed(letter)]
    assert deltas[0].kind == "tool_call"
    assert deltas[0].name == "weather"
    assert len(deltas) > 5
    assert {delta.name for delta in deltas[1:]} == {""}


def test_without_tools_a_call_is_text(core: Core) -> None:
    assert read(core, render(core), SPELLED) == plain(SPELLED)
    assert read(core, render(core, tools=TOOLS, tool_choice="none"), SPELLED) == plain(SPELLED)


def test_a_call_that_breaks_off_loses_nothing(core: Core) -> None:
    parser = core.native.ChatParser(render(core, tools=TOOLS))
    deltas = parser.feed('a <tool_call>\n{"name": "weather", "arguments": {"city": "Os') + parser.finish()
    assert parser.rejected
    assert parser.content == "a "
    assert [call[1:] for call in parser.tool_calls] == [("weather", '{"city": "Os')]
    assert "".join(delta.text for delta in deltas if delta.kind == "tool_call") == '{"city": "Os'


def test_after_a_rejection_all_is_content(core: Core) -> None:
    prompt = render(core, tools=TOOLS)
    text = f"<tool_call>\nnonsense\n</tool_call>{' and so on' * 10}{SPELLED}"
    assert read(core, prompt, text) == plain(text, rejected=True)


def test_a_continued_reply_does_not_repeat_what_was_said(core: Core) -> None:
    said = {"role": "assistant", "content": "The weather in Oslo"}
    prompt = render(core, [USER, said], continue_final=True)
    assert prompt.prompt.endswith("The weather in Oslo")
    assert read(core, prompt, " is wet.", continues=True) == plain(" is wet.")
    assert read(core, prompt, " is wet.") == plain("The weather in Oslo is wet.")


def test_a_continued_thought_goes_on(core: Core) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Oslo is"}
    prompt = render(core, [USER, thought], continue_final=True)
    assert prompt.prompt.endswith("Oslo is")
    parts = read(core, prompt, " wet.</think>Rain.", continues=True)
    assert parts == plain("Rain.", " wet.")


def test_a_parser_can_be_read_before_its_end(core: Core) -> None:
    parser = core.native.ChatParser(render(core))
    assert parser.feed("") == []
    assert (parser.content, parser.reasoning, parser.tool_calls, parser.rejected) == ("", "", [], False)
    parser.feed("<think>a")
    assert parser.reasoning == "a"
    parser.finish()
    assert parser.finish() == []


def test_a_deep_nest_of_brackets_is_survived(core: Core) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": ' + '{"a": [' * 20_000
    parser = core.native.ChatParser(render(core, tools=TOOLS))
    for at in range(0, len(text), 10_000):
        parser.feed(text[at : at + 10_000])
    parser.finish()
    assert parser.rejected


def test_prompts_and_deltas_are_frozen(core: Core) -> None:
    prompt = render(core)
    delta = core.native.ChatParser(prompt).feed("text")[0]
    for value, name in ((prompt, "prompt"), (delta, "text")):
        with pytest.raises((AttributeError, FrozenInstanceError)):
            setattr(value, name, "x")


def test_a_prompt_constrains_its_sampler(core: Core) -> None:
    vocab = core.model().vocab
    params = core.native.SamplerParams()
    render(core, tools=TOOLS).constrain(params, vocab)
    assert params.grammar
    assert params.grammar_lazy
    assert params.grammar_trigger_patterns or params.grammar_trigger_tokens
    assert not params.grammar_prefill
    assert vocab.detokenize(params.reasoning_start) == b"<think>"
    assert [vocab.detokenize(end) for end in params.reasoning_ends] == [b"</think>"]
    assert params.reasoning_forced == params.reasoning_ends[0]
    assert params.reasoning_budget == -1
    core.native.Sampler(vocab, params)
    render(core, tools=TOOLS, tool_choice="required").constrain(params, vocab)
    assert not params.grammar_lazy
    assert params.grammar_prefill == vocab.tokenize("<|im_start|>assistant\n", add_special=False, parse_special=True)
    core.native.Sampler(vocab, params)
    render(core).constrain(params, vocab)
    assert params.grammar == ""


def test_a_required_call_is_what_the_grammar_makes(core: Core) -> None:
    prompt = render(core, tools=TOOLS, tool_choice="required", enable_thinking=False)
    vocab = core.model().vocab
    params = core.params(temperature=0.0)
    prompt.constrain(params, vocab)
    sampler = core.native.Sampler(vocab, params)
    spelled = SPELLED.replace("Oslo", "a")  # the fake's grammars admit the smallest instance of a schema
    for token in vocab.tokenize(spelled, add_special=False, parse_special=True):
        sampler.accept(token)
    with pytest.raises(errors.BadGrammar):
        sampler.accept(ord("x"))
