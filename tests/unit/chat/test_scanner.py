"""Calls written as plain text: found however the text is cut, and nothing else is touched or held."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.chat.scanner import CallScanner

NAMES = ("get_weather", "add")
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
ADD = '{"name": "add", "arguments": {"a": [1, {"b": "}\\""}]}}'


def scan(text: str, n: int = 1, *, streams: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    scanner = CallScanner(NAMES, streams=streams)
    pieces = [piece for i in range(0, len(text), n) for piece in scanner.feed(text[i : i + n])] + scanner.finish()
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "start":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
    said = "".join(piece.text for piece in pieces if piece.kind == "text")
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"```json\n{OSLO}\n```", ""),
        (f"```json {OSLO} ```", ""),
        (f"```\n{OSLO}\n```", ""),
        (f"```xml\n<tool_call>\n{OSLO}\n</tool_call>\n```", ""),
        (f"```json\n{OSLO}", ""),
        (f"Let me look.\n```json\n{OSLO}\n```\nOne moment.", "Let me look.\n\nOne moment."),
        (OSLO, ""),
        (f"\n{OSLO}\n", ""),
        (f"[{OSLO}]", ""),
        (f"{{{OSLO}}}", ""),
        (f"```json\n{{{OSLO}}}\n```", ""),
        (f"<tool_call>\n{{{OSLO}}}\n</tool_call>", ""),
        (f"<tool_call>\n{OSLO}\n</tool_call>", ""),
        (f"<tools>{OSLO}</tools>", ""),
    ],
)
def test_a_call_is_found(text: str, said: str, n: int, streams: bool) -> None:
    assert scan(text, n, streams=streams) == (said, [("get_weather", {"city": "Oslo"})])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{OSLO}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        f"```json\n{OSLO}\n{ADD}\n```",
        f"```xml\n<tool_call>{OSLO}</tool_call>\n<tool_call>{ADD}</tool_call>\n```",
        f"[{OSLO}, {ADD}]",
    ],
)
def test_several_calls_are_found(text: str, streams: bool) -> None:
    wanted = [("get_weather", {"city": "Oslo"}), ("add", {"a": [1, {"b": '}"'}]})]
    assert scan(text, streams=streams) == ("", wanted)
    assert scan(text, 5, streams=streams) == ("", wanted)


PROSE = [
    '```json\n{"name": "Bob", "arguments": {}}\n```',
    '```json\n{"city": "Oslo"}\n```',
    '```python\nprint("```")\n```\nand then',
    f"{OSLO} is what I would call.",
    '{"name": "Bob", "age": 3}',
    "{hello} <p>world</p> a < b << c `x` ``y`` [1] { x }",
    "<tool_call>broken</tool_call> text",
    "```json\n{broken\n```",
    "   \n leading space",
    "{{ name }} and {{name}}",
    "```",
    "``",
    "<tool_ca",
    '{"name": "add"',
    '{"name": "add", "arguments": 3}',
]


@pytest.mark.parametrize("n", [1, 4, 1000])
@pytest.mark.parametrize("text", PROSE)
def test_everything_else_goes_through_unchanged(text: str, n: int) -> None:
    assert scan(text, n) == (text, [])


@pytest.mark.parametrize(
    "text", ["a stray </p> and", "if x { y", "{ hello", "<div>", "```python\nimport os", '{"a": 1']
)
def test_prose_is_not_held_back(text: str) -> None:
    scanner = CallScanner(NAMES)
    shown = "".join(piece.text for letter in text + "." for piece in scanner.feed(letter))
    assert shown == text + "."


@given(st.text(alphabet='`{}[]<>/":,\n abjsontl_c', max_size=60), st.integers(1, 9))
def test_text_without_a_known_name_is_never_changed(text: str, n: int) -> None:
    assert scan(text, n) == (text, [])


def test_arguments_stream_while_they_come() -> None:
    scanner = CallScanner(NAMES, streams=True)
    kinds = [piece.kind for piece in scanner.feed('<tool_call>\n{"name": "add", "arguments": {"a": ')]
    assert kinds == ["start", "arguments"]
    assert [piece.kind for piece in scanner.feed("1}")] == ["arguments", "end"]


def test_a_call_that_is_cut_off_is_closed() -> None:
    scanner = CallScanner(NAMES, streams=True)
    scanner.feed('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert [piece.kind for piece in scanner.finish()] == ["end"]
