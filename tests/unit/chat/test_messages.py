"""Messages: what is taken, what it becomes, and how a wrong one is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.chat.messages import normalise
from kvasir.errors import BadOption, Unsupported

CALL = {"id": "a1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_text_is_a_message_of_the_user() -> None:
    assert normalise("Hello") == [{"role": "user", "content": "Hello"}]


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert normalise([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]


def test_calls_have_their_arguments_as_json_text() -> None:
    (message,) = normalise([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_what_comes_out_goes_in_again_unchanged() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "1+1?", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a1", "name": "add", "content": "2"},
    ]
    once = normalise(messages)
    assert normalise(once) == once
    assert [message["role"] for message in once] == ["developer", "user", "assistant", "tool"]


def test_what_other_clients_leave_empty_is_ignored() -> None:
    dumped: dict[str, Any] = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None}
    assert normalise([dumped]) == [{"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "messages is empty"),
        ({"role": "user", "content": "x"}, "list of messages, got dict"),
        (["hello"], "message 0 must be a dict"),
        ([{"role": "user", "content": "x"}, {"role": "usr", "content": "x"}], "message 1: role .* Did you mean 'user'"),
        ([{"role": "user", "content": 3}], "message 0 must have content"),
        ([{"role": "user"}], "message 0 must have content"),
        ([{"role": "assistant"}], "message 0 has neither content nor tool_calls"),
        ([{"role": "user", "content": "x", "contents": 1}], "unknown field 'contents'. Did you mean 'content'"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only the assistant makes"),
        ([{"role": "tool", "content": "x"}], "needs the tool_call_id"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}], "not like"),
        ([{"role": "user", "content": [{"text": "x"}]}], "content part"),
    ],
)
def test_a_wrong_message_is_named(messages: Any, why: str) -> None:
    with pytest.raises(BadOption, match=why):
        normalise(messages)


def test_an_image_is_refused_clearly() -> None:
    with pytest.raises(Unsupported, match="message 0: a content part is of type 'image_url'"):
        normalise([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
