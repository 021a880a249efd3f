"""Grammars around other grammars: thinking before an answer, and tool calls for templates that know none.

Owns how GBNF texts are put together. Pure: text in, text out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kvasir.chat.tools import Tool
from kvasir.model.sampler import compiled_schema

_ROOT = re.compile(r"^root(\s*::=)", re.M)
# llama.cpp lets a reply that must call something say anything before it, without an end.
_PROSE = re.compile(r"(?<= )until-\d+\?? (?=(?:space )?[\w-]*tool-call)")
_CALLS = re.compile(r"^(tool-calls ::= \(.*\))\+$", re.M)
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


def after_thinking(grammar: str, *, start: str, ends: Sequence[str], opened: bool) -> str:
    """Let a reply think first: what follows the end of its thinking obeys `grammar`.

    `opened` says that the prompt has begun the thinking; else the reply may begin it with `start`, or not think.
    """
    thought = "kv-until kv-space kv-answer"
    root = thought if opened else f"kv-space {_literal(start)} {thought} | kv-answer"
    space = "kv-space ::= [ \\t\\n]*"
    return "\n".join([f"root ::= {root}", *_until(ends), space, _renamed(grammar, "kv-answer")])


def without_prose(grammar: str) -> str:
    """Take out of llama.cpp's grammar for a required call the text that may come before the call."""
    return "\n".join(_PROSE.sub("", line) if line.startswith("root ::=") else line for line in grammar.split("\n"))


def only_one_call(grammar: str) -> str:
    """Take the repetition out of llama.cpp's grammar for calls, which has it also where several are not wanted."""
    return _CALLS.sub(r"\1", grammar)


def tool_calls(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return what admits calls of these tools as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    body = compiled_schema({"anyOf": calls} if len(calls) > 1 else calls[0]).grammar
    more = ' ("\\n"? kv-call)*' if parallel else ""
    return "\n".join(
        [
            f"root ::= kv-call{more}",
            f'kv-call ::= {_literal(CALL_START)} "\\n"? kv-body "\\n"? {_literal(CALL_END)}',
            _renamed(body, "kv-body"),
        ]
    )


def _renamed(grammar: str, name: str) -> str:
    return _ROOT.sub(rf"{name}\1", grammar, count=1)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _until(ends: Sequence[str]) -> list[str]:
    """Rules for `kv-until`: any text up to and with the first of these ends (an Aho-Corasick automaton)."""
    prefixes = sorted({end[:n] for end in ends for n in range(len(end))}, key=lambda prefix: (len(prefix), prefix))
    names = {prefix: f"kv-until-{i}" if i else "kv-until" for i, prefix in enumerate(prefixes)}
    return [f"{names[prefix]} ::= {_moves(prefix, ends, names)}" for prefix in prefixes]


def _moves(prefix: str, ends: Sequence[str], names: dict[str, str]) -> str:
    letters = sorted({end[n] for end in ends for n in range(len(end))})
    moves: list[str] = []
    elsewhere: list[str] = []
    for letter in letters:
        seen = prefix + letter
        if any(seen.endswith(end) for end in ends):
            moves.append(_literal(letter))
            continue
        target = next(seen[i:] for i in range(len(seen) + 1) if seen[i:] in names)
        if target:
            moves.append(f"{_literal(letter)} {names[target]}")
        else:
            elsewhere.append(letter)
    named = [letter for letter in letters if letter not in elsewhere]
    return " | ".join([f"[^{''.join(map(_in_class, named))}] {names['']}", *moves])


def _in_class(letter: str) -> str:
    return f"\\x{ord(letter):02X}" if letter in "\\]^-[" else json.dumps(letter, ensure_ascii=False)[1:-1]
