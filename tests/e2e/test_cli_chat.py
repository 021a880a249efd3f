"""`kvasir chat` as a shell and a terminal run it, on real llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_cli import kvasir
from tests.models_e2e.fetch import chatting
from tests.pseudo_terminal import CTRL_C, CTRL_D, ENTER, PseudoTerminal

PLAIN = ("--temperature", "0", "-n", "12", "--ignore-eos", "--context-size", "1024")


def command(model: Path, folder: Path) -> list[str]:
    """A chat whose replies begin with a word we know, and do not end by themselves."""
    grammar = folder / "reply.gbnf"
    grammar.write_text('root ::= "begun " ("word ")+')
    sizes = ["--ignore-eos", "--grammar", str(grammar), "--context-size", "2048"]
    return ["-m", "kvasir", "chat", "-m", str(model), *sizes]


def test_each_line_of_a_pipe_is_answered(chat_path: Path) -> None:
    done = kvasir("chat", "-m", chat_path, *PLAIN, "--json", input="Hello\nAnd now?\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    plain = kvasir("chat", "-m", chat_path, *PLAIN, input="Hello\nAnd now?\n")
    assert (plain.returncode, plain.stderr) == (0, "")
    for reply in (first, second):
        assert reply["content"].strip() in plain.stdout


@pytest.mark.models
def test_the_default_model_says_hello(real_path: Path, is_default: bool) -> None:
    done = kvasir("chat", "-m", chatting(real_path), "--temperature", "0", "-n", "30", input="Hi\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_default or "Hello" in done.stdout


def test_a_person_talks_stops_a_reply_undoes_saves_and_loads(tiny_llama: Path, tmp_path: Path) -> None:
    home, saved = str(tmp_path / "home"), tmp_path / "chat.json"
    with PseudoTerminal(*command(tiny_llama, tmp_path), "--system", "Be brief.", KVASIR_HOME=home) as screen:
        screen.wait_for("/2,048")
        screen.press(f"hello{ENTER}")
        screen.wait_for("begun")
        screen.press(CTRL_C)
        screen.wait_for("(stopped)")
        screen.wait_for("tokens/s")
        screen.press(f"/save {saved}{ENTER}")
        screen.wait_for("saved 3 messages")
        screen.press(f"/undo{ENTER}")
        screen.wait_for("forgot “hello”")
        screen.press(f"/load {saved}{ENTER}")
        screen.wait_for("loaded 3 messages")
        screen.press(f"/stats{ENTER}")
        screen.wait_for("hits")
        screen.press(f"/nosuch{ENTER}")
        screen.wait_for("there is no command /nosuch")
        screen.press(CTRL_D)
        assert screen.wait() == 0
        assert "Traceback" not in screen.text
    assert [message["role"] for message in json.loads(saved.read_text())["messages"]] == ["system", "user", "assistant"]


@pytest.mark.models
def test_ctrl_c_stops_a_real_reply_at_once(real_path: Path, tmp_path: Path) -> None:
    with PseudoTerminal(*command(chatting(real_path), tmp_path), KVASIR_HOME=str(tmp_path)) as screen:
        screen.wait_for("/2,048")
        screen.press(f"Tell me a long story.{ENTER}")
        screen.wait_for("begun")
        screen.press(CTRL_C)
        screen.wait_for("(stopped)", timeout_s=10)
        screen.wait_for("tokens/s")
        screen.press(f"/quit{ENTER}")
        assert screen.wait() == 0
