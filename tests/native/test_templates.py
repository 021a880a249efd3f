"""The chat templates in llama.cpp's source tree: they render without weights, and what a model replies is read right.

No list of replies is kept where the template can be asked: how it spells a call is what it prints for one in the
history. A thought is its own two markers around a text.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

import kvasir
import llama_cpp
from kvasir import native
from kvasir.errors import BadRequest
from tests.models import write_model

NAMES = [
    "Apertus-8B-Instruct", "Apriel-1.6-15b-Thinker-fixed", "Bielik-11B-v3.0-Instruct", "ByteDance-Seed-OSS",
    "Cohere2MoE", "CohereForAI-c4ai-command-r-plus-tool_use", "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6", "GLM-4.7-Flash", "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-K3", "LFM2-8B-A1B", "LFM2.5-8B-A1B", "LFM2.5-Instruct", "MiMo-VL",
    "MiniMax-M1", "MiniMax-M2", "MiniMax-M3", "Mistral-Small-3.2-24B-Instruct-2506",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
    "Qwen3-Coder", "Qwen3.5-4B", "Reka-Edge", "Spark2.5", "StepFun3.5-Flash",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4-Flash-0731",
    "deepseek-ai-DeepSeek-V4", "fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it",
    "google-gemma-4-31B-it-interleaved", "google-gemma-4-31B-it", "ibm-granite-granite-3.3-2B-Instruct",
    "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "inclusionai-ling-3.0-flash", "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world", "meetkai-functionary-medium-v3.1", "meetkai-functionary-medium-v3.2",
    "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct",
    "microsoft-Phi-3.5-mini-instruct", "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407", "moonshotai-Kimi-K2", "muse-glimmer", "openai-gpt-oss-120b",
    "openbmb-MiniCPM5-1B", "poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2", "tencent-Hy3",
    "unsloth-Apriel-1.5", "unsloth-mistral-Devstral-Small-2507", "upstage-Solar-Open-100B",
]  # fmt: skip

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}]
)
ARGUMENTS = {"city": "Paris", "days": 3}
USER = {"role": "user", "content": "How is it there?"}
ANSWER = {"role": "assistant", "content": "Fine."}
FUNCTION = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"}
SYSTEM = {"role": "system", "content": "Be brief."}

STRAY = "So, <b>x</b> {y} [z] </p> it is 🌧 < 5 | {"
THOUGHT = "hm, <i> so {"


@functools.cache
def template(name: str) -> Any:
    path = Path(llama_cpp.current_source().folder) / "models" / "templates" / f"{name}.jinja"
    return native.ChatTemplate(source=path.read_text(encoding="utf-8"), bos_token="<s>", eos_token="</s>")


def render(name: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    return template(name).render(json.dumps(messages), **options)


def read(prompt: Any, text: str, *, n: int = 1) -> dict[str, Any]:
    """Feed a reply `n` bytes at a time, as whole characters, and check that what is given adds up."""
    parser = native.ChatParser(prompt)
    deltas = [delta for at in range(0, len(text), n) for delta in parser.feed(text[at : at + n])] + parser.finish()
    for kind in ("content", "reasoning"):
        assert "".join(delta.text for delta in deltas if delta.kind == kind) == getattr(parser, kind)
    return {
        "content": parser.content.strip(), "reasoning": parser.reasoning.strip(),
        "calls": [(name, arguments) for _, name, arguments in parser.tool_calls],
    }  # fmt: skip


def read_both_ways(prompt: Any, text: str) -> dict[str, Any]:
    parts = read(prompt, text)
    assert parts == read(prompt, text, n=len(text) or 1)
    return parts


def is_open(prompt: Any) -> bool:
    """Tell whether the template itself has begun the thinking."""
    start = prompt.thinking_start
    return bool(start) and prompt.generation_prompt.rstrip().endswith(start)


def test_no_template_is_left_out() -> None:
    folder = Path(llama_cpp.current_source().folder) / "models" / "templates"
    assert sorted(path.stem for path in folder.glob("*.jinja")) == sorted(NAMES)


# Gemma 2 knows the user and the model, in turns.
REFUSED = {("google-gemma-2-2b-it", "tools"): "alternate"}
# llama.cpp's parsers of these leave a schema out: who asks for one must bring the grammar.
WITHOUT_SCHEMA = {
    "GigaChat3-10B-A1.8B", "Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-K3", "inclusionai-ling-3.0-flash",
    "meetkai-functionary-medium-v3.2", "moonshotai-Kimi-K2",
}  # fmt: skip
TALKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": ([USER], {}),
    "turns": ([USER, ANSWER, USER], {}),
    "thinking off": ([USER], {"enable_thinking": False}),
    "system": ([SYSTEM, USER], {}),
    "tools": ([SYSTEM, USER, CALL, RESULT], {"tools": TOOLS}),
    "required": ([USER], {"tools": TOOLS, "tool_choice": "required"}),
    "schema": ([USER], {"json_schema": json.dumps(PARAMETERS)}),
    "continued": ([USER, ANSWER], {"continue_final": True}),
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", NAMES)
def test_it_renders_without_weights(name: str, talk: str) -> None:
    messages, options = TALKS[talk]
    if (name, talk) in REFUSED:
        with pytest.raises(BadRequest, match=REFUSED[name, talk]):
            render(name, messages, **options)
        return
    prompt = render(name, messages, **options)
    assert USER["content"] in prompt.prompt
    assert prompt.prompt.endswith(prompt.generation_prompt)
    if talk == "schema":
        assert bool(prompt.grammar) == (name not in WITHOUT_SCHEMA)
    if talk == "continued":
        assert prompt.prompt.rstrip().endswith("Fine.")


@pytest.mark.parametrize("talk", ["plain", "thinking off", "tools", "required", "schema"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_model_replies_nothing_is_lost(name: str, talk: str) -> None:
    messages, options = TALKS["plain" if (name, talk) in REFUSED else talk]
    prompt = render(name, messages, **options)
    parts = read_both_ways(prompt, STRAY)
    assert parts["calls"] == []
    assert parts["content"] + parts["reasoning"] == STRAY


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "meta-llama-Llama-3.1-8B-Instruct", "openai-gpt-oss-120b"])
def test_a_long_reply_is_not_read_again_for_every_token(name: str) -> None:
    prompt = render(name, [USER], tools=TOOLS)
    parser = native.ChatParser(prompt)
    parser.feed(OFF.get(name, "") + "It")
    began = time.process_time()
    for _ in range(40_000):
        parser.feed(" is ")
    assert time.process_time() - began < 10  # half a second; a minute where each token costs a whole reading
    assert len(parser.content) == 2 + 160_000


# What the template prints is not what the model writes, or there is no thought to be had.
OTHER_THOUGHTS = {
    "openai-gpt-oss-120b": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>"
    ),
    "muse-glimmer": f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>",
    "Cohere2MoE": f"{THOUGHT}<|END_THINKING|><|START_TEXT|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (f"<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_RESPONSE|>"),
    "Kimi-K3": f"{THOUGHT}<|close|>think<|sep|><|open|>response<|sep|>",
    "Apriel-1.6-15b-Thinker-fixed": f"{THOUGHT}[BEGIN FINAL RESPONSE]",
}
NO_THOUGHTS = {"LFM2-8B-A1B", "LFM2.5-Instruct", "tencent-Hy3"}  # no marker in the template; closed by the prompt


def thought(name: str, prompt: Any) -> str:
    if name in OTHER_THOUGHTS:
        return OTHER_THOUGHTS[name]
    return f"{'' if is_open(prompt) else prompt.thinking_start}{THOUGHT}{prompt.thinking_ends[0]}"


@pytest.mark.parametrize("tools", ["", TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_told_from_the_answer(name: str, tools: str) -> None:
    prompt = render(name, [USER], tools=tools)
    if not prompt.supports_thinking or name in NO_THOUGHTS:
        assert read_both_ways(prompt, "Sunny.")["content"] == "Sunny."
        return
    parts = read_both_ways(prompt, thought(name, prompt) + "Sunny.")
    assert parts == {"content": "Sunny.", "reasoning": THOUGHT, "calls": []}


# A model with two templates, one of them for tools

CALLING_TOO = (
    "{%- if tools %}{{- 'You may call:' }}{%- for tool in tools %}{{- ' ' + (tool | tojson) }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def two_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        "llama",
        tmp_path_factory.mktemp("templates") / "two.gguf",
        edit=lambda keys: keys.add_string("tokenizer.chat_template.tool_use", CALLING_TOO),
    )


def test_the_variant_for_tools_is_used_with_tools_alone(two_templates: Path) -> None:
    with kvasir.load(two_templates, vocab_only=True) as model:
        without = model.render([USER])
        tools = json.loads(TOOLS)
        with_tools = model.render([SYSTEM, USER, CALL, RESULT], tools=tools)
        assert model.render([USER], tools=tools, tool_choice="none") == without
    assert without == "<|im_start|>user\nHow is it there?<|im_end|>\n<|im_start|>assistant\n"
    assert with_tools.startswith("You may call: {")
    assert '"get_weather"' in with_tools
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>' in with_tools


def test_calls_are_read_as_the_variant_for_tools_writes_them(two_templates: Path) -> None:
    model = native.Model.load(str(two_templates), vocab_only=True)
    assert model.chat_template("tool_use") == CALLING_TOO
    both = native.ChatTemplate(model)
    prompt = both.render(json.dumps([USER]), tools=TOOLS)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert read_both_ways(prompt, call)["calls"] == [("get_weather", '{"city": "Paris"}')]
    assert read_both_ways(both.render(json.dumps([USER])), call) == {"content": call, "reasoning": "", "calls": []}


def test_most_templates_think_and_some_begin_by_themselves() -> None:
    prompts = {name: render(name, [USER]) for name in NAMES}
    thinking = {name for name, prompt in prompts.items() if prompt.supports_thinking} - NO_THOUGHTS
    opening = {name for name in thinking if is_open(prompts[name])}
    assert len(thinking) >= 38
    assert len(opening) >= 20
    assert {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Qwen-QwQ-32B", "Qwen3.5-4B"} <= opening
    assert {"Qwen-Qwen3-0.6B", "openai-gpt-oss-120b", "mistralai-Ministral-3-14B-Reasoning-2512"} <= thinking - opening


@pytest.mark.parametrize("name", NAMES)
def test_thinking_that_is_off_stays_off(name: str) -> None:
    prompt = render(name, [USER], enable_thinking=False)
    parts = read_both_ways(prompt, OFF.get(name, "") + "Sunny.")
    if is_open(prompt) or name == "Apriel-1.6-15b-Thinker-fixed":  # the template thinks whatever it is told
        assert parts == {"content": "", "reasoning": "Sunny.", "calls": []}
    else:
        assert parts == {"content": "Sunny.", "reasoning": "", "calls": []}


OFF = {"openai-gpt-oss-120b": "<|channel|>final<|message|>", "muse-glimmer": " to=user<|message|>"}

# Templates that show tools and calls, and whose calls llama.cpp cannot read: an id it does not expect stands in them.
UNREADABLE = {"upstage-Solar-Open-100B", "Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"}
CALLING = [
    name
    for name in NAMES
    if name
    not in {
        *UNREADABLE, "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct",
        "fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it",
        "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world",
        "microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1",
    }
]  # fmt: skip
OTHER_CALLS = {
    "openai-gpt-oss-120b": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
    "meetkai-functionary-medium-v3.2": "get_weather\n{ARGUMENTS}",
    "muse-glimmer": (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
}
# Where the turn of the one who called ends, and what comes before the result.
ENDS = (
    "<|assistant_end|>", "<seed:eos>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|observation|>",
    "<|message_sep|>\n\nfunction result", "<|message_sep|>\n\nuser", "<|im_end|>", "<|close|>tools<|sep|>",
    "<end_of_sentence>", "[e~[", "</s>", "<SPECIAL_12>", "<sep>", "<｜end▁of▁sentence｜>", "<turn|>", "[sunny]",
    "<|tool_response>", "<|end_of_text|>", "<|role_end|>", "<|eot_id|>", "<|eom_id|>", "</assistant>",
    "<｜hy_eos:opensource｜>", "<|im_user|>", "<|im_system|>", "<｜tool▁outputs▁begin｜>", "<tool_response>",
)  # fmt: skip


def spelled(name: str, prompt: Any) -> str:
    """Return a call as the template writes it."""
    if name in OTHER_CALLS:
        return OTHER_CALLS[name].replace("{ARGUMENTS}", json.dumps(ARGUMENTS))
    history: str = render(name, [USER, CALL, RESULT], tools=TOOLS, add_generation_prompt=False).prompt
    after = history.split(str(USER["content"]))[1]
    words = [word.strip() for _, word, _ in prompt.grammar_triggers] or ['{"name"']
    call = after[min(after.index(word) for word in words if word in after) :]
    return call[: min((call.index(end) for end in ENDS if end in call), default=len(call))]


@pytest.mark.parametrize("name", CALLING)
def test_a_call_is_read_as_the_template_writes_it(name: str) -> None:
    assert template(name).caps["supports_tools"]
    assert template(name).caps["supports_tool_calls"]
    prompt = render(name, [USER], tools=TOOLS)
    begun = f"{THOUGHT}{prompt.thinking_ends[0]}" if is_open(prompt) else ""
    parts = read_both_ways(prompt, begun + spelled(name, prompt))
    assert [(called, json.loads(arguments)) for called, arguments in parts["calls"]] == [("get_weather", ARGUMENTS)]
    assert parts["content"] == ""
    assert parts["reasoning"] == (THOUGHT if begun else "")


@pytest.mark.parametrize("name", ["NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Qwen-Qwen2.5-7B-Instruct"])
def test_the_calls_of_hermes(name: str) -> None:
    prompt = render(name, [USER], tools=TOOLS, parallel_tool_calls=True)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    one = ("get_weather", '{"city": "Paris"}')
    expected = {"content": "I look.", "reasoning": "", "calls": [one]}
    assert read_both_ways(prompt, f"I look.\n{call}") == expected
    assert read_both_ways(prompt, f"I look.\n{call}\n{call}") == expected | {"calls": [one, one]}
    assert read_both_ways(prompt, f"A <b>, a {{ and </tool_call>. {call}")["calls"] == [one]
    broken = "<tool_call>\n{nonsense}\n</tool_call>"
    assert read_both_ways(prompt, broken) == {"content": broken, "reasoning": "", "calls": []}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("meta-llama-")])
@pytest.mark.parametrize("end", ["<|eom_id|>", "<|eot_id|>", ""])
def test_the_calls_of_llama_3(name: str, end: str) -> None:
    prompt = render(name, [USER], tools=TOOLS)
    for tag in ("", "<|python_tag|>"):
        call = f'{tag}{{"name": "get_weather", "parameters": {{"city": "Paris", "days": 3}}}}{end}'
        assert read_both_ways(prompt, call)["calls"] == [("get_weather", json.dumps(ARGUMENTS))]
    shown = "" if name in WITH_TAG else end  # the others never see their end token as text
    assert read_both_ways(prompt, f"Sunny {{ < |.{end}")["content"] == f"Sunny {{ < |.{shown}"


WITH_TAG = ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"]


@pytest.mark.parametrize("name", WITH_TAG)
@pytest.mark.parametrize("end", ["<|eom_id|>", ""])
def test_the_python_tag_of_llama_3(name: str, end: str) -> None:
    prompt = render(name, [USER], tools=TOOLS, kwargs={"builtin_tools": '["wolfram_alpha", "code_interpreter"]'})
    assert "<|python_tag|>" in prompt.preserved_tokens
    cases = {
        'get_weather.call(city="Paris", days=3)': ("get_weather", ARGUMENTS),
        'wolfram_alpha.call(query="2 \\"x\\", (3)")': ("wolfram_alpha", {"query": '2 "x", (3)'}),
        "wolfram_alpha.call( a = 'b' , c = True, d=None )": ("wolfram_alpha", {"a": "b", "c": True, "d": None}),
        "wolfram_alpha.call()": ("wolfram_alpha", {}),
        'print("Ås {")\nx.call = 1': ("code_interpreter", {"code": 'print("Ås {")\nx.call = 1'}),
    }
    for body, (called, arguments) in cases.items():
        parts = read_both_ways(prompt, f"I see.<|python_tag|>{body}{end}")
        assert parts["content"] == "I see."
        assert [(one, json.loads(text)) for one, text in parts["calls"]] == [(called, arguments)], body


@pytest.mark.parametrize("name", WITH_TAG)
@pytest.mark.parametrize("body", ["print(1)", "f.call(x)", "f.call(x=)", "f.call(x=1) and more", "", "f.ca"])
def test_what_only_looks_like_python_is_text(name: str, body: str) -> None:
    prompt = render(name, [USER], tools=TOOLS)
    parts = read_both_ways(prompt, f"<|python_tag|>{body}")
    assert body in parts["content"] or parts["calls"]
    if "f.call" not in body:
        assert parts == {"content": f"<|python_tag|>{body}", "reasoning": "", "calls": []}
