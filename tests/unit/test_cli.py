"""The commands: what they print, what they refuse, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvasir
from kvasir.cli import doctor
from kvasir.cli.main import app
from kvasir.config import load_settings
from kvasir.errors import ModelNotFound
from kvasir.native import fake
from kvasir.service.model import Model

GREEDY = ["--temperature", "0", "--ignore-eos"]


@pytest.fixture(autouse=True)
def fake_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every model is the fake one, unless its reference says `missing`."""

    def resolve(ref: str | None, **more: Any) -> Path:
        if ref == "missing":
            raise ModelNotFound("'missing' is no model.")
        return Path(ref or "fake:plain")

    def load(path: Path = Path("fake:plain"), *, progress: Any = None, **options: Any) -> Model:
        if path.name == "broken":
            raise ZeroDivisionError("a bug")
        return Model.open(path, load_settings(options), core=fake)

    monkeypatch.setattr("kvasir.cli.run.resolve", resolve)
    monkeypatch.setattr(kvasir, "load", load)
    monkeypatch.chdir(tmp_path)


def invoke(*args: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin)


def test_run_prints_the_text_and_a_line_end() -> None:
    done = invoke("run", *GREEDY, "--max-tokens", "8", "abc")
    with kvasir.load() as model:
        want = model.generate("abc", temperature=0, ignore_eos=True, max_tokens=8).text
    assert done.exit_code == 0
    assert done.stdout.removesuffix("\n") == want.removesuffix("\n")
    assert done.stderr == ""


@pytest.mark.parametrize("args", [["-"], []])
def test_run_reads_standard_input_without_its_last_line_end(args: list[str]) -> None:
    want = invoke("run", *GREEDY, "-n", "8", "hello").stdout
    assert invoke("run", *GREEDY, "-n", "8", *args, stdin="hello\n").stdout == want


def test_run_as_json_is_one_object() -> None:
    done = invoke("run", *GREEDY, "-n", "4", "--json", "--seed", "3", "abc")
    value = json.loads(done.stdout)
    assert value["seed"] == 3
    assert value["finish_reason"] == "length"
    assert len(value["tokens"]) == 4
    assert value["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4}
    assert set(value["timings"]) == {"queue_s", "prefill_s", "first_token_s", "decode_s"}
    assert isinstance(value["text"], str)


def test_run_takes_any_other_option_by_name() -> None:
    done = invoke(
        "run", "-o", "typical_p=0.9", "-o", "slots=2", "-o", 'samplers=["top_k", "temperature"]', "-n", "2", "a"
    )
    assert done.exit_code == 0


def test_stop_strings_repeat() -> None:
    whole = json.loads(invoke("run", *GREEDY, "-n", "40", "--json", "abc").stdout)["text"]
    cut = json.loads(invoke("run", *GREEDY, "-n", "40", "--json", "--stop", "\0\0", "--stop", whole[4:6], "abc").stdout)
    assert cut["stop"] == whole[4:6]
    assert cut["text"] == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "--temprature", "1", "a"], "Did you mean --temperature?"),
        (["run", "--temperature", "-1", "a"], "temperature must be"),
        (["run", "--temperature", "warm", "a"], "temperature"),
        (["run", "-o", "typical_q=1", "a"], "Did you mean 'typical_p'?"),
        (["run", "-o", "typical_p", "a"], "name=value"),
        (["run", "-o", "n_batch=1", "a"], "batch"),
        (["run", ""], "prompt is empty"),
        (["run", "--grammar", "no-such-file.gbnf", "a"], "no-such-file.gbnf"),
        (["run", "--json-schema", "{", "a"], "not valid JSON"),
        (["run", "--json-schema", "no-such-file.json", "a"], "no-such-file.json"),
        (["run", "--context-size", "0", "a"], "context_size"),
        (["embed", "-o", "temperature=1", "a"], "sampling option"),
        (["embed", "--normalize", "l3", "a"], "l3"),
        (["tokenize", "--decode", "one two"], "token ids"),
        (["tokenize", "--decode", "999999"], "out of range"),
        (["run", "a", "b"], "b"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(args: list[str], says: str) -> None:
    done = invoke(*args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert done.stderr.startswith("kvasir: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_failure_is_one_line_and_code_1() -> None:
    done = invoke("run", "-m", "missing", "a")
    assert (done.exit_code, done.stderr) == (1, "kvasir: 'missing' is no model.\n")


def test_a_bug_is_one_line_too() -> None:
    done = invoke("run", "-m", "broken", "a")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "ZeroDivisionError" in done.stderr


def test_input_that_is_no_utf8_is_refused() -> None:
    assert invoke("run", "-", stdin=b"\xff\xfe").exit_code == 2
    assert invoke("embed", "-", stdin=b"\xff\xfe").exit_code == 2


def test_ctrl_c_stops_with_130_and_a_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    monkeypatch.setattr("kvasir.service.stream.Stream.__iter__", interrupted)
    done = invoke("run", "abc")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "one\n", "")


def test_embed_prints_a_line_of_numbers_per_text() -> None:
    done = invoke("embed", "one", "two")
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [len(row) for row in rows] == [32, 32]
    assert sum(value * value for value in rows[0]) == pytest.approx(1, rel=1e-3)
    assert invoke("embed", "-", stdin="one\ntwo\n").stdout == done.stdout
    value = json.loads(invoke("embed", "--json", "one", "two").stdout)
    assert value["n"] == 32
    assert len(value["vectors"]) == 2


def test_tokenize_there_and_back() -> None:
    tokens = invoke("tokenize", "héllo 🦙").stdout
    assert invoke("tokenize", "--decode", "-", stdin=tokens).stdout == "héllo 🦙\n"
    assert invoke("tokenize", "--pieces", "a").stdout == "97\t'a'\n"
    assert json.loads(invoke("tokenize", "--json", "ab").stdout) == {"tokens": [97, 98], "pieces": ["a", "b"]}
    assert json.loads(invoke("tokenize", "--json", "-d", "97").stdout) == {"text": "a"}


def test_every_command_has_help_with_examples() -> None:
    listed = invoke("--help").stdout
    for command in ("run", "embed", "tokenize", "pull", "models", "doctor"):
        assert f"\n  {command} " in listed
        assert "kvasir " + command in invoke(command, "--help").stdout
    assert "130  interrupted" in listed


def test_version() -> None:
    assert invoke("--version").stdout == f"kvasir {kvasir.__version__}\n"


def test_doctor_tells_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "resolve", lambda *args, **more: Path("fake:plain"))
    done = invoke("doctor", "--json")
    value = json.loads(done.stdout)
    assert {finding["check"] for finding in value["findings"]} >= set(doctor.CHECKS)
    assert done.exit_code == (0 if value["ok"] else 1)
    assert "generation" in invoke("doctor").stdout


def test_doctor_downloads_nothing_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "store"))
    done = invoke("doctor")
    assert done.exit_code == 1
    assert "-> Fetch the model with `kvasir pull`" in done.stdout
    assert not (tmp_path / "store").exists()


def test_doctor_reports_a_broken_setting_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("kvasir.toml").write_text("[load]\nthreds = 3\n")
    value = json.loads(invoke("doctor", "--json").stdout)
    failed = {finding["check"] for finding in value["findings"] if not finding["ok"]}
    assert "threads" in failed
    assert "memory" not in failed


# Real processes


def run(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvasir", *args], capture_output=True, text=True, timeout=60, **more)


def test_the_module_runs_as_a_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvasir {kvasir.__version__}\n")


def test_no_traceback_from_a_missing_file() -> None:
    done = run("run", "-m", "no-such-file.gguf", "a", stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert done.stderr.startswith("kvasir: ")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "kvasir", "--version"], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_run_without_a_prompt_on_a_terminal_says_so() -> None:
    leader, follower = pty.openpty()
    done = run("run", stdin=follower)
    os.close(leader)
    os.close(follower)
    assert done.returncode == 2
    assert "give a PROMPT" in done.stderr
