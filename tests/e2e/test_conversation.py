"""Conversations on real llama.cpp: equal to one long prompt, cut without decoding, back from disk after a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvasir
from kvasir.engine.radix import common_prefix
from kvasir.types import FinishReason

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SYSTEM = "You are a guide to a small town and answer in a few words."


@pytest.fixture
def steady(chat_path: Path) -> Any:
    """Opens the model so that no figure depends on where its cells lie or on how many rows a tick has."""
    return lambda **options: kvasir.load(chat_path, **{"context_size": 2048, "slots": 2, "threads": 1, **options})


def test_turns_are_the_same_as_one_long_prompt(steady: Any) -> None:
    with steady(type_v="bf16") as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        replies = [chat.say(text).result() for text in ("Where is the mill?", "And the inn?", "Thank you.")]
        messages = chat.messages
    with steady(type_v="bf16", cache=False) as model:
        for i, reply in enumerate(replies):
            said = model.chat(messages[: 2 + 2 * i], cache=False, **GREEDY)
            assert said.usage.cached_tokens == 0
            assert said.content == reply.content
            assert said.usage.prompt_tokens == reply.usage.prompt_tokens


def test_the_books_and_the_core_agree(steady: Any) -> None:
    with steady(cache=False, layout="split") as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        for text in ("Where is the mill?", "And the inn?", "Thank you."):
            n_tokens, before = chat.n_tokens, model.stats().rows_decoded
            reply = chat.say(text).result()
            assert reply.usage.cached_tokens == n_tokens
            assert chat.n_tokens - n_tokens == model.stats().rows_decoded - before
            assert chat.n_tokens == model.stats().cells_used


def test_a_cut_decodes_nothing_but_the_new_turn(steady: Any) -> None:
    with steady(cache=False, context_size=1024, layout="split") as model:
        if not model.info.can_shift:
            pytest.skip("this model's memory cannot drop its oldest part")
        chat = model.conversation(system=SYSTEM, **GREEDY)
        for _ in range(100):
            before = (chat.n_tokens, model.stats().rows_decoded)
            reply = chat.say("Tell me more about this town, please.").result()
            if chat.evicted:
                break
        assert model.stats().counters.shifted > 0
        assert reply.finish_reason is FinishReason.LENGTH
        assert reply.usage.cached_tokens < before[0]
        assert chat.n_tokens - reply.usage.cached_tokens == model.stats().rows_decoded - before[1]
        assert chat.n_tokens == model.stats().cells_used
        assert chat.say("And then?").result().content


def test_a_fork_decodes_nothing_but_its_own_turn(steady: Any) -> None:
    with steady(cache=False, layout="unified", slots=4) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        chat.say("Where is the mill?").result()
        n_tokens, before = chat.n_tokens, model.stats().rows_decoded
        twin = chat.fork()
        assert twin.n_tokens == n_tokens
        assert model.stats().rows_decoded == before
        for each, text in ((twin, "And the inn?"), (chat, "And the church?")):
            before = model.stats().rows_decoded
            reply = each.say(text).result()
            assert reply.usage.cached_tokens >= n_tokens
            n_new = each.n_tokens - reply.usage.cached_tokens
            assert model.stats().rows_decoded - before == n_new
        assert twin.messages[:3] == chat.messages[:3]


def test_another_reply_decodes_nothing_but_itself(steady: Any) -> None:
    with steady(cache=False, layout="unified", slots=4) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        first = chat.say("Where is the mill?").result()
        n_tokens, before = chat.n_tokens, model.stats().rows_decoded
        again = chat.regenerate().result()
        assert again.content == first.content
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
        assert chat.n_tokens == n_tokens
        # The prompt's last token and all but the last of the reply run; and where what is left without the reply, and
        # then with it, is read again, its last token.
        assert model.stats().rows_decoded - before == GREEDY["max_tokens"] + 2


def test_an_edited_message_decodes_only_what_follows(steady: Any) -> None:
    with steady(cache=False, layout="unified", slots=4) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        chat.say("Where is the mill?").result()
        n_kept = chat.n_tokens
        chat.say("And the inn?").result()
        n_all, before = chat.n_tokens, model.stats().rows_decoded
        chat.edit(3, "And the church?")
        n_read = chat.n_tokens
        assert n_kept < n_read < n_all
        n_rows = model.stats().rows_decoded - before
        assert 0 < n_rows <= n_read - n_kept
        before = model.stats().rows_decoded
        reply = chat.reply().result()
        assert reply.usage.cached_tokens == n_read
        n_new = chat.n_tokens - n_read
        assert model.stats().rows_decoded - before == n_new


def test_memory_that_was_cut_never_enters_the_cache(steady: Any, tmp_path: Path) -> None:
    """A fresh engine finds what was computed before the cut, and nothing of what came after it."""
    options = {"cache_dir": tmp_path / "kv", "context_size": 1024, "layout": "split"}
    with steady(**options) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        for i in range(100):
            whole = list(chat._tokens)
            chat.say(f"Question {i}: tell me more about house number {i}, please.").result()
            if chat.evicted:
                break
        assert model.stats().counters.shifted == 1
        left = list(chat._tokens)
        assert chat.n_tokens == len(left)
    n_same = common_prefix(whole, left)
    assert n_same < len(left) // 2
    asked = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with steady(**options) as model:
        done = model.generate([*left, 65], **asked)
        assert done.usage.cached_tokens <= n_same
        assert done.tokens == model.generate([*left, 65], cache=False, **asked).tokens


def test_after_a_restart_the_first_turn_is_a_disk_hit(steady: Any, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path / "kv", "cache_ram_bytes": 0}
    with steady(**options) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        chat.say("Where is the mill? " * 12).result()
        chat.save(tmp_path / "chat.json")
        n_tokens = chat.n_tokens
    with steady(**options) as model:
        again = model.conversation(resume=tmp_path / "chat.json", **GREEDY)
        assert again.n_tokens == n_tokens
        stats = model.stats()
        assert stats.counters.restored == 1
        assert stats.rows_decoded < n_tokens // 4
        assert again.say("And the inn?").result().usage.cached_tokens == n_tokens


def test_conversations_that_rest_come_back_from_the_cache(steady: Any, tmp_path: Path) -> None:
    with steady(cache_dir=tmp_path / "kv") as model:
        chats = [model.conversation(system=f"{SYSTEM} You are number {i}. " * 6, **GREEDY) for i in range(6)]
        for turn in range(2):
            for chat in chats:
                n_tokens = chat.n_tokens
                reply = chat.say(f"Where is house number {turn}?").result()
                assert reply.usage.cached_tokens >= n_tokens - 1
        assert model.stats().counters.restored > 0


def test_a_stop_string_ends_the_turn_and_the_conversation_goes_on_warm(steady: Any) -> None:
    with steady(cache=False) as model:
        chat = model.conversation(system=SYSTEM, **GREEDY)
        whole = chat.say("Where is the mill?").result().content
        chat.undo()
        stop = whole[len(whole) // 2 :][:2]
        reply = chat.say("Where is the mill?", stop=[stop]).result()
        assert reply.finish_reason is FinishReason.STOP
        assert stop not in chat.messages[-1]["content"]
        n_tokens = chat.n_tokens
        assert chat.say("And the inn?").result().usage.cached_tokens >= n_tokens - 1


@pytest.mark.models
def test_after_a_cut_a_known_text_is_about_as_likely_as_after_reading_anew(is_default: bool) -> None:
    """The figure that docs/conversations.md gives, and its limit, are the benchmark's."""
    if not is_default:
        pytest.skip("the figure is the default model's")
    script = Path(__file__).parents[2] / "bench" / "eviction.py"
    command = [sys.executable, str(script), "--quick", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perplexity read anew / cut" in done.stdout
