"""`kvasir chat`: plain in a pipe, its /commands, and on a terminal everything a person does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from typer.testing import CliRunner

import kvasir
from kvasir.chat.events import ChatReply, ChatUsage, Done, Event, Evicted, Reasoning, Text, ToolCall, ToolCallDone
from kvasir.cli.chat import begin
from kvasir.cli.figures import gauge, level
from kvasir.cli.main import app
from kvasir.cli.prompt_line import HISTORY, CommandCompleter, PromptLine
from kvasir.cli.reply import ReplyView
from kvasir.cli.slash import COMMANDS, Answer, obey
from kvasir.cli.talk import Talk
from kvasir.cli.terminal import PATIENCE, Stop, Terminal
from kvasir.config import load_settings
from kvasir.errors import BadRequest, ModelNotFound, Unsupported
from kvasir.native import fake
from kvasir.service.model import Model
from kvasir.types import FinishReason, Timings
from tests.pseudo_terminal import CTRL_C, CTRL_D, ENTER, PseudoTerminal
from tests.unit.test_service import open_fake

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
FLAGS = ["--temperature", "0", "-n", "8", "--ignore-eos", "--no-cache"]
CHILD = Path(__file__).with_name("chat_child.py")


@pytest.fixture
def model() -> Iterator[Model]:
    with open_fake(context_size=2048, slots=1, cache=False) as opened:
        yield opened


@pytest.fixture
def talk(model: Model) -> Talk:
    return begin(model, system="Be brief.", load=None, options=GREEDY)


@pytest.fixture(autouse=True)
def fake_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every model is the fake one, unless its reference says `missing`."""

    def resolve(ref: str | None, **more: Any) -> Path:
        if ref == "missing":
            raise ModelNotFound("'missing' is no model.")
        return Path(ref or "fake:plain")

    def load(path: Path = Path("fake:plain"), *, progress: Any = None, **options: Any) -> Model:
        return Model.open(path, load_settings(options), core=fake)

    monkeypatch.setattr("kvasir.cli.run.resolve", resolve)
    monkeypatch.setattr(kvasir, "load", load)
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def invoke(*args: str, stdin: str | bytes = "") -> Any:
    return CliRunner().invoke(app, ["chat", *FLAGS, *args], input=stdin)


# In a pipe


def test_each_line_is_a_turn_of_one_conversation(model: Model) -> None:
    done = invoke(stdin="hello\n\n  more  \n")
    chat = model.conversation(**GREEDY)
    want = [chat.say(text).result().content for text in ("hello", "more")]
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in want)


def test_json_is_one_object_for_each_reply() -> None:
    values = [json.loads(line) for line in invoke("--json", stdin="one\ntwo\n").stdout.splitlines()]
    assert [value["usage"]["completion_tokens"] for value in values] == [8, 8]
    assert values[1]["usage"]["cached_tokens"] > 0
    assert values[0]["finish_reason"] == "length"


def test_a_system_prompt_comes_from_the_line_or_a_file() -> None:
    Path("persona.txt").write_text("Be brief.\n")
    given = invoke("--system", "Be brief.", stdin="hello\n").stdout
    assert invoke("--system", "@persona.txt", stdin="hello\n").stdout == given
    assert invoke(stdin="hello\n").stdout != given


def test_a_saved_conversation_goes_on(talk: Talk) -> None:
    talk.chat.say("hello").result()
    talk.save(Path("chat.json"))
    want = talk.chat.say("more").result().content
    assert invoke("--load", "chat.json", stdin="more\n").stdout.removesuffix("\n") == want.removesuffix("\n")


def test_a_system_prompt_replaces_that_of_a_loaded_conversation(talk: Talk, model: Model) -> None:
    talk.chat.say("hello").result()
    talk.save(Path("chat.json"))
    other = begin(model, system="Be long.", load=Path("chat.json"), options=GREEDY)
    assert [message["role"] for message in other.chat.messages] == ["system", "user", "assistant"]
    assert other.system == "Be long."


def test_a_line_that_fails_is_told_and_the_next_is_answered() -> None:
    done = invoke("--context-size", "256", "--evict", "refuse", stdin=f"{'x' * 500}\nhello\n")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "there is room for" in done.stderr
    assert done.stdout


def test_what_was_given_up_is_told_on_standard_error() -> None:
    done = invoke("--context-size", "256", stdin="a message of some length\n" * 8)
    assert done.exit_code == 0
    assert "old messages given up" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["-m", "missing"], 1, "'missing' is no model."),
        (["--load", "missing.json"], 1, "cannot be read"),
        (["--load", "bad.json"], 2, "not a saved conversation"),
        (["--system", "@missing.txt"], 2, "--system cannot read"),
        (["--template", "missing.jinja"], 2, "missing.jinja"),
        (["--evict", "newest"], 2, "newest"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["-m", "fake:plain?template=0"], 1, "no chat template"),
    ],
)
def test_errors_are_one_line_before_anything_is_said(args: list[str], code: int, says: str) -> None:
    Path("bad.json").write_text("no json")
    done = invoke(*args, stdin="hello\n")
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_bytes_that_are_no_text_are_no_crash() -> None:
    assert invoke(stdin=b"\xff\xfe\n").exit_code == 0


def test_a_reply_may_take_half_the_context_unless_told(model: Model) -> None:
    assert begin(model, system=None, load=None, options={})._options["max_tokens"] == model.limit // 2
    assert begin(model, system=None, load=None, options={"max_tokens": 3})._options["max_tokens"] == 3


# /commands


def said(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.chat.messages if message["role"] == "user"]


def test_undo_forgets_a_turn(talk: Talk) -> None:
    for text in ("one", "two"):
        talk.chat.say(text).result()
    assert "two" in obey(talk, "/undo").lines[0]
    assert said(talk) == ["one"]
    obey(talk, "/undo")
    with pytest.raises(BadRequest, match="nothing has been said"):
        obey(talk, "/undo")


def test_regenerate_answers_again(talk: Talk) -> None:
    first = talk.chat.say("one").result()
    answer = obey(talk, "/regenerate")
    assert answer.reply is not None
    assert answer.reply().result().content == first.content
    assert said(talk) == ["one"]


def test_edit_asks_in_other_words(talk: Talk) -> None:
    talk.chat.say("one").result()
    assert obey(talk, "/edit") == Answer(draft="/edit one")
    answer = obey(talk, "/edit two and a half")
    assert answer.reply is not None
    assert answer.reply().result().content
    assert said(talk) == ["two and a half"]
    several = obey(talk, "/edit\none\ntwo")
    assert several.reply is not None
    several.reply().result()
    assert said(talk) == ["one\ntwo"]


@pytest.mark.parametrize("line", ["/edit", "/edit x", "/regenerate", "/undo"])
def test_there_must_be_something_to_change(talk: Talk, line: str) -> None:
    with pytest.raises(BadRequest, match="nothing has been said"):
        obey(talk, line)


def test_save_and_load(talk: Talk) -> None:
    talk.chat.say("one").result()
    obey(talk, "/save chat.json")
    obey(talk, "/save chat.json")  # again is fine
    obey(talk, "/clear")
    assert said(talk) == []
    assert talk.system == "Be brief."
    lines = obey(talk, "/load chat.json").lines
    assert "3 messages" in lines[0]
    assert lines[1] == "user: one"
    assert said(talk) == ["one"]


def test_files_of_others_are_not_overwritten(talk: Talk) -> None:
    Path("notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match="give another name"):
        obey(talk, "/save notes.txt")
    assert Path("notes.txt").read_text() == "mine"


def test_a_file_that_cannot_be_loaded_changes_nothing(talk: Talk) -> None:
    talk.chat.say("one").result()
    Path("bad.json").write_text("{}")
    with pytest.raises(BadRequest):
        obey(talk, "/load bad.json")
    assert said(talk) == ["one"]


def test_the_system_prompt_is_shown_and_set(talk: Talk) -> None:
    talk.chat.say("one").result()
    assert obey(talk, "/system").lines == ["Be brief."]
    obey(talk, "/system Be long.")
    assert talk.system == "Be long."
    assert said(talk) == ["one"]
    assert talk.chat.say("two").result().content


def test_a_conversation_without_a_system_prompt_gets_one(model: Model) -> None:
    talk = begin(model, system=None, load=None, options=GREEDY)
    assert obey(talk, "/system").lines == ["there is no system prompt."]
    talk.chat.say("one").result()
    obey(talk, "/system Be long.")
    assert [message["role"] for message in talk.chat.messages] == ["system", "user", "assistant"]


def test_figures(talk: Talk) -> None:
    assert "there is none yet" in "\n".join(obey(talk, "/stats").lines)
    for text in ("one", "two"):
        talk.replies.append(talk.chat.say(text).result())
    shown = "\n".join(obey(talk, "/stats").lines)
    for word in ("cached", "tokens/s", "first token", "2 replies", f"{talk.chat.n_tokens:,}/2,048", "cache"):
        assert word in shown
    *rows, total = obey(talk, "/tokens").lines
    assert sum(int(row.split()[0]) for row in rows) == int(total.split()[0]) == talk.chat.n_tokens
    assert [row.split()[1] for row in rows] == ["system", "user", "assistant", "user", "assistant"]


def test_help_names_every_command(talk: Talk) -> None:
    shown = "\n".join(obey(talk, "/help").lines)
    assert all(f"/{name}" in shown for name in COMMANDS)
    assert obey(talk, "/quit").is_end


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/undu", "Did you mean '/undo'?"),
        ("/xyzzy", "there is no command /xyzzy"),
        ("/save", "/save needs a FILE"),
        ("/undo 3", "takes nothing"),
        ("/", "there is no command /"),
        ("/etc/passwd is a file", "// begins a message"),
    ],
)
def test_a_wrong_command_is_told_with_a_way_out(talk: Talk, line: str, says: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        obey(talk, line)
    assert says in str(wrong.value)


@pytest.mark.parametrize(
    ("n_tokens", "want", "how"),
    [(0, "░░░░░░░░░░ 0/1,000", "low"), (1, "█░░░░░░░░░ 1/1,000", "low"), (800, "████████░░ 800/1,000", "high"),
     (1000, "██████████ 1,000/1,000", "full"), (1200, "██████████ 1,200/1,000", "full")],
)  # fmt: skip
def test_the_gauge(n_tokens: int, want: str, how: str) -> None:
    assert gauge(n_tokens, 1000) == want
    assert level(n_tokens, 1000) == how


def completions(text: str) -> list[str]:
    return [found.text for found in CommandCompleter().get_completions(Document(text), CompleteEvent())]


def test_commands_and_files_are_completed() -> None:
    Path("chat.json").write_text("")
    assert completions("/re") == ["regenerate"]
    assert completions("/load ch") == ["at.json"]
    assert completions("/system ch") == completions("hello /re") == completions("re") == []


# What a reply looks like


def view(*events: Event, width: int = 40) -> str:
    out = io.StringIO()
    with ReplyView(Console(file=out, force_terminal=True, color_system="standard", width=width)) as shown:
        for event in events:
            shown.show(event)
    return out.getvalue()


def done(reason: FinishReason = FinishReason.STOP) -> Done:
    usage = ChatUsage(1, 0, 5)
    reply = ChatReply(content="x", finish_reason=reason, usage=usage, timings=Timings(0, 0, 0, 0), seed=0)
    return Done(reply)


def test_thinking_is_dim_and_closed_with_a_line() -> None:
    shown = view(Reasoning("I "), Reasoning("wonder\n"), Text("An **answer**."), done())
    assert shown == f"\x1b[2mI\x1b[0m\x1b[2m wonder\x1b[0m\n\x1b[2m{'─' * 40}\x1b[0m\nAn \x1b[1manswer\x1b[0m.\n"


def test_a_call_is_one_line() -> None:
    call = ToolCall.of("1", "weather", '{"city": "Oslo\x1b[2J"}')
    assert '→ weather({"city": "Oslo[2J"})' in view(Text("Let me see. "), ToolCallDone(0, call), done())


def test_what_was_given_up_is_one_line() -> None:
    assert "2 old messages given up, 30 tokens" in view(Evicted(({}, {}), 30), Text("x"), done())


@pytest.mark.parametrize(
    ("reason", "says"), [(FinishReason.CANCELLED, "(stopped)"), (FinishReason.LENGTH, "cut off after 5 tokens")]
)
def test_a_reply_that_did_not_end_by_itself_says_so(reason: FinishReason, says: str) -> None:
    assert says in view(Text("x"), done(reason))
    assert says not in view(Text("x"), done())


# The loop


def converse(talk: Talk, keys: str) -> str:
    """What a person sees who types these keys, and then leaves."""
    out = io.StringIO()
    terminal = Terminal(talk, Console(file=out, width=60))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        terminal.run(PromptLine(Path("home"), toolbar=terminal.toolbar), first=[])
    return out.getvalue()


def test_a_line_is_answered_and_the_gauge_follows(talk: Talk) -> None:
    converse(talk, f"hello{ENTER}/undo{ENTER}more{ENTER}{CTRL_D}")
    assert said(talk) == ["more"]
    assert len(talk.replies) == 2
    terminal = Terminal(talk, Console(file=io.StringIO()))
    assert "0/0" in terminal.toolbar()[0][1]


def test_several_lines_are_one_message(talk: Talk) -> None:
    converse(talk, f"one\x1b{ENTER}two{ENTER}\x1b[200~three\r\nfour\x1b[201~{ENTER}{CTRL_D}")
    assert said(talk) == ["one\ntwo", "three\nfour"]


def test_a_message_may_begin_with_a_slash(talk: Talk) -> None:
    converse(talk, f"//etc{ENTER}{CTRL_D}")
    assert said(talk) == ["/etc"]


def test_errors_are_told_and_the_chat_goes_on(talk: Talk) -> None:
    shown = converse(talk, f"/undu{ENTER}{'x' * 3000}{ENTER}hello{ENTER}{CTRL_D}")
    assert "Did you mean '/undo'?" in shown
    assert "/undo or /clear make room." in " ".join(shown.split())
    assert said(talk) == ["hello"]


def test_edit_offers_the_last_question(talk: Talk) -> None:
    converse(talk, f"one{ENTER}/edit{ENTER} and a half{ENTER}/quit{ENTER}never seen")
    assert said(talk) == ["one and a half"]


@pytest.mark.parametrize("leave", [CTRL_D, CTRL_C + CTRL_C, f"half a line{CTRL_C}{CTRL_C}", f"/quit{ENTER}"])
def test_ways_to_leave(talk: Talk, leave: str) -> None:
    converse(talk, leave)
    assert said(talk) == []


def test_ctrl_c_clears_the_line_and_typing_goes_on(talk: Talk) -> None:
    converse(talk, f"wrong{CTRL_C}hello{CTRL_C}right{ENTER}{CTRL_D}")
    assert said(talk) == ["right"]


def test_what_was_typed_is_there_next_time_and_for_nobody_else(talk: Talk) -> None:
    converse(talk, f"hello{ENTER}{CTRL_D}")
    assert (Path("home") / HISTORY).stat().st_mode & 0o077 == 0
    converse(talk, f"\x1b[A{ENTER}{CTRL_D}")
    assert said(talk) == ["hello", "hello"]


def test_no_folder_for_the_history_is_no_problem(talk: Talk) -> None:
    Path("home").write_text("a file")
    converse(talk, f"hello{ENTER}{CTRL_D}")
    assert said(talk) == ["hello"]


class Pressing(Console):
    """A screen that has Ctrl-C pressed once this text is on it."""

    def __init__(self, out: io.StringIO) -> None:
        super().__init__(file=out, width=60)
        self.n_prints = 0

    def print(self, *args: Any, **more: Any) -> None:
        super().print(*args, **more)
        self.n_prints += bool(more.get("soft_wrap"))
        if self.n_prints == 2:
            self.n_prints += 1
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_reply_and_what_was_said_stays(model: Model) -> None:
    talk = begin(model, system=None, load=None, options={**GREEDY, "max_tokens": 1000})
    out = io.StringIO()
    terminal = Terminal(talk, Pressing(out))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(f"one{ENTER}{CTRL_D}")
        terminal.run(PromptLine(Path("home"), toolbar=terminal.toolbar), first=[])
    assert "(stopped)" in out.getvalue()
    (reply,) = talk.replies
    assert reply.finish_reason is FinishReason.CANCELLED
    assert 0 < len(reply.content) < 200  # however far the model had run ahead
    assert talk.chat.messages[-1]["content"] == reply.content
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_question_stopped_before_its_answer_is_forgotten(talk: Talk) -> None:
    terminal = Terminal(talk, Console(file=io.StringIO()))
    say = talk.chat.say

    def press_and_say() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return say("x" * 1000)

    terminal._reply(press_and_say)
    assert talk.chat.messages[-1]["role"] == "system" or talk.replies[-1].content


def test_ctrl_c_again_and_again_gets_out() -> None:
    stop = Stop()
    for _ in range(PATIENCE - 1):
        stop.press()
    with pytest.raises(KeyboardInterrupt):
        stop.press()


def test_a_model_without_a_template_says_so(model: Model) -> None:
    with open_fake(facts="template=0") as bare, pytest.raises(Unsupported, match="no chat template"):
        begin(bare, system=None, load=None, options=GREEDY)


# A real terminal


def test_a_chat_as_a_person_has_it(tmp_path: Path) -> None:
    (tmp_path / "reply.gbnf").write_text('root ::= "# Head\\nSome **bold** text."')
    args = ["--no-cache", "--no-think", "--grammar", str(tmp_path / "reply.gbnf"), "--context-size", "2048"]
    with PseudoTerminal(CHILD, "chat", *args, KVASIR_HOME=str(tmp_path)) as screen:
        screen.wait_for("0/2,048")
        screen.press(f"hello{ENTER}")
        screen.wait_for("Some bold text.")
        assert "\x1b[1mbold\x1b[0m" in screen.raw
        screen.wait_for("/2,048", times=2)
        screen.press(f"/stats{ENTER}")
        screen.wait_for("first token")
        screen.press(f"/quit{ENTER}")
        assert screen.wait() == 0
        assert "Traceback" not in screen.text


@contextlib.contextmanager
def slow_chat(home: Path, *flags: str) -> Iterator[PseudoTerminal]:
    """A chat that is giving a reply, slowly: it begins with a word we know, and does not end by itself."""
    (home / "reply.gbnf").write_text('root ::= "begun " ("word ")+')
    args = ["--no-cache", "--no-think", "--ignore-eos", "--grammar", str(home / "reply.gbnf"), *flags]
    with PseudoTerminal(CHILD, "chat", *args, KVASIR_HOME=str(home), STEP_DELAY_S="0.01") as screen:
        screen.wait_for("░ 0/")
        screen.press(f"hello{ENTER}")
        screen.wait_for("begun")
        yield screen
        screen.press(CTRL_D)
        assert screen.wait() == 0
        assert "Traceback" not in screen.text


def test_ctrl_c_on_a_terminal_stops_the_reply_not_the_program(tmp_path: Path) -> None:
    with slow_chat(tmp_path) as screen:
        screen.press(CTRL_C)
        screen.wait_for("(stopped)")
        screen.wait_for("tokens/s")
        screen.press(f"/tokens{ENTER}")
        screen.wait_for("begun", times=2)


def test_what_is_typed_while_a_reply_runs_is_there_for_the_next_prompt(tmp_path: Path) -> None:
    with slow_chat(tmp_path, "-n", "60") as screen:
        screen.press(f"/help{ENTER}")
        screen.wait_for("cut off")
        assert "/help" not in screen.text.split("begun")[1].split("cut off")[0]
        screen.wait_for("Forget the last question")
