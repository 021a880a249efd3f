"""The commands as a shell runs them, on real llama.cpp."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KVASIR = [sys.executable, "-m", "kvasir"]


def kvasir(*args: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [*KVASIR, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **more)


def test_run_streams_plain_text(any_path: Path) -> None:
    args = ("run", "-m", any_path, "--temperature", "0", "-n", "12", "-o", "context_size=512")
    done = kvasir(*args, "Once upon a time")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")
    assert "\x1b" not in done.stdout
    assert kvasir(*args, "-", input="Once upon a time\n").stdout == done.stdout
    assert kvasir(*args, input="Once upon a time\n").stdout == done.stdout


def test_run_as_json(any_path: Path) -> None:
    args = ("run", "-m", any_path, "--json", "--seed", "3", "-n", "5", "--ignore-eos", "--context-size", "512")
    value = json.loads(kvasir(*args, "Hello").stdout)
    assert value["seed"] == 3
    assert len(value["tokens"]) == value["usage"]["completion_tokens"] == 5
    assert value["finish_reason"] == "length"
    assert value["timings"]["decode_s"] >= 0


@pytest.mark.models
def test_the_default_model_makes_sense(real_path: Path, is_default: bool) -> None:
    done = kvasir("run", "-m", real_path, "--temperature", "0", "-n", "12", "The capital of France is")
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_default or "Paris" in done.stdout


def test_embed_and_tokenize(any_path: Path) -> None:
    vectors = json.loads(kvasir("embed", "-m", any_path, "--json", "one", "two").stdout)["vectors"]
    assert len(vectors) == 2
    tokens = kvasir("tokenize", "-m", any_path, "héllo 🦙").stdout
    assert kvasir("tokenize", "-m", any_path, "--decode", "-", input=tokens).stdout == "héllo 🦙\n"


def test_ctrl_c_stops_with_130(tiny_llama: Path) -> None:
    command = [
        *KVASIR,
        "run",
        "-m",
        str(tiny_llama),
        "-n",
        "100000",
        "--ignore-eos",
        "-o",
        "context_size=2048",
        "Hello",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    # A tiny model may reach the end of its context before the signal comes; then it has simply ended.
    assert process.returncode in (130, 0)
    assert err == b""
    assert out.endswith(b"\n")
    assert time.monotonic() - started < 5


@pytest.mark.models
def test_ctrl_c_stops_a_real_model_at_once(real_path: Path) -> None:
    process = subprocess.Popen(
        [*KVASIR, "run", "-m", str(real_path), "-n", "4000", "--ignore-eos", "Hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert out.endswith(b"\n")
    assert time.monotonic() - started < 3


def test_a_closed_pipe_ends_quietly(tiny_llama: Path) -> None:
    command = " ".join([*KVASIR, "run", "-m", str(tiny_llama), "-n", "1500", "--ignore-eos", "Hello"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 5 | wc -c; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["5", "0"]


def test_errors_are_one_line(tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(os.urandom(999))
    for args, code in [
        (("run", "-m", tmp_path / "bad.gguf", "a"), 1),
        (("run", "-m", tmp_path / "missing.gguf", "a"), 1),
        (("run", "-m", tiny_bert, "a"), 1),
        (("run", "-m", tiny_bert, "--temperature", "-1", "a"), 2),
    ]:
        done = kvasir(*args)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("kvasir: ")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_doctor_on_a_given_model(any_path: Path) -> None:
    value = json.loads(kvasir("doctor", "--json", "-m", any_path).stdout)
    found = {finding["check"]: finding for finding in value["findings"]}
    assert found["versions"]["ok"]
    assert found["backend"]["ok"]
    assert "tokens/s" in found["generation"]["detail"]
