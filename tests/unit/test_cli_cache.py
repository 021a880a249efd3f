"""`kvasir cache` as a shell sees it, on the fake core: what it prints, asks, refuses, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvasir
from kvasir.cache import Listed
from kvasir.cli import cache as command
from kvasir.cli.main import app
from kvasir.cli.units import parse_age, parse_bytes, show_age, show_bytes
from kvasir.config import load_settings
from kvasir.errors import BadOption
from kvasir.native import fake
from kvasir.service.model import Model

TEXT = "Once upon a time there was a king who had three daughters and no crown at all. " * 4
RUN = ["run", "--json", "--temperature", "0", "--ignore-eos", "-n", "4"]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and a fake model that is a file, as only files are cached."""

    def load(path: Path, *, progress: Any = None, **options: Any) -> Model:
        return Model.open(path, load_settings(options), core=fake)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVASIR_CACHE_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("KVASIR_BLOCK_TOKENS", "64")
    monkeypatch.setattr("kvasir.cli.run.resolve", lambda ref, **more: Path("fake:plain"))
    monkeypatch.setattr(kvasir, "load", load)
    Path("fake:plain").write_text("a model")
    Path("prompt.txt").write_text(TEXT + "\n")


def invoke(*args: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin)


def run(*args: str) -> Any:
    return json.loads(invoke(*RUN, *args).stdout)["usage"]


def row_files() -> list[Path]:
    return sorted(Path("kv").rglob("*.row"))


def test_an_empty_cache_is_told_of_and_no_folder_is_made() -> None:
    listed = invoke("cache", "ls")
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert "is empty" in listed.stderr
    assert json.loads(invoke("cache", "ls", "--json").stdout) == []
    assert json.loads(invoke("cache", "stats", "--json").stdout)["hit_ratio"] == 0
    assert invoke("cache", "verify").stdout.startswith("whole: 0 rows (0 B), bad: 0, in ")
    assert invoke("cache", "clear", "--yes").stdout == "freed 0 B, left 0 rows (0 B)\n"
    assert not Path("kv").exists()


def test_a_second_run_is_a_hit_and_no_cache_turns_it_off() -> None:
    first, again, without = run(TEXT), run(TEXT), run("--no-cache", TEXT)
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == first["prompt_tokens"] - 1
    assert without["cached_tokens"] == 0


def test_no_cache_leaves_nothing_behind() -> None:
    run("--no-cache", TEXT)
    assert not Path("kv").exists()


def test_embedding_leaves_the_cache_alone() -> None:
    assert invoke("embed", "one").exit_code == 0
    assert not Path("kv").exists()


def test_stats_name_every_counter() -> None:
    run(TEXT)
    run(TEXT)
    value = json.loads(invoke("cache", "stats", "--json").stdout)
    assert (value["hits"], value["hits_exact"], value["misses"], value["hit_ratio"]) == (1, 1, 1, 0.5)
    assert value["misses_by_reason"] == {"absent": 1}
    assert value["tiers"]["disk"]["rows"] == len(row_files())
    assert value["folder"] == str(Path("kv").absolute())
    assert min(value[f"{name}_ns"] for name in ("export", "publish", "read", "import", "search")) > 0
    text = invoke("cache", "stats").stdout
    for name in set(value) - {"folder", "hits", "tiers", "short_by_reason", "errors_by_code"}:
        assert f"\n{name}" in text, name
    assert "  absent               1\n" in text
    assert "\nhit_ratio              0.500\n" in text


def test_looking_counts_nothing() -> None:
    run(TEXT)
    before = invoke("cache", "stats", "--json").stdout
    invoke("cache", "ls")
    invoke("cache", "stats")
    assert invoke("cache", "stats", "--json").stdout == before


def test_ls_is_an_indented_tree_in_a_pipe() -> None:
    run(TEXT)
    run(TEXT[:100] + "But that was long ago, and nobody knows what came of it in the end. " * 3)
    lines = invoke("cache", "ls").stdout.splitlines()
    assert lines[0].startswith("space ")
    assert lines[1].startswith("  0-64  1 row  ")
    assert "  1 hit  disk  " in lines[1]
    assert [line[:7] for line in lines[2:]] == ["    64-"] * 2
    rows = json.loads(invoke("cache", "ls", "--json").stdout)
    assert len(rows) == len(row_files())
    assert {"key", "tier", "bytes", "last_used", "leases", "status", "path", "hits"} <= set(rows[0])


def test_ls_tells_logits_from_kv() -> None:
    """They are kept once a prompt has come twice, in a space of their own."""
    for _ in range(2):
        run(TEXT)
    lines = invoke("cache", "ls").stdout.splitlines()
    assert sorted("(logits)" in line for line in lines if line.startswith("space ")) == [False, True]
    rows = json.loads(invoke("cache", "ls", "--json").stdout)
    assert [row["end"] for row in rows if row["holds"] == "logits"] == [run(TEXT)["prompt_tokens"]]
    assert sum(row["holds"] == "kv" for row in rows) == len(rows) - 1 > 1


def test_warm_of_a_short_prompt_that_came_before() -> None:
    """Its only row reaches into the reply, and its logits are known: it is there all the same."""
    Path("short.txt").write_text(TEXT[:45])
    for _ in range(2):
        n_tokens = run(TEXT[:45])["prompt_tokens"]
    done = invoke("cache", "warm", "short.txt")
    assert (done.exit_code, done.stdout.split(" (")[0]) == (0, f"{n_tokens} tokens were there already")


def test_verify_removes_what_is_damaged_and_exits_with_1() -> None:
    run(TEXT)
    flipped, cut, *good = row_files()
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    cut.write_bytes(b"short")
    done = invoke("cache", "verify")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:2] == [f"removed {flipped.absolute()}", "removed 1 file cut short"]
    assert f"whole: {len(good)} rows (" in done.stdout
    assert ", bad: 2, in " in done.stdout
    assert row_files() == good
    again = invoke("cache", "verify", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["bad"] == []
    assert json.loads(invoke("cache", "stats", "--json").stdout)["corrupt_files"] == 2


def test_verify_as_json_counts_what_it_removed() -> None:
    run(TEXT)
    bad = row_files()[0]
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    done = invoke("cache", "verify", "--json")
    assert done.exit_code == 1
    value = json.loads(done.stdout)
    assert (len(value["bad"]), value["removed"]) == (1, 1)


def test_prune_by_size_and_by_age() -> None:
    run(TEXT)
    assert invoke("cache", "prune", "--older-than", "1h").stdout.startswith("freed 0 B, left ")
    half = sum(path.stat().st_size for path in row_files()) // 2
    small = json.loads(invoke("cache", "prune", "--to", f"{half}B", "--json").stdout)
    assert small["freed_bytes"] > 0
    assert small["bytes"] == sum(path.stat().st_size for path in row_files()) <= half
    assert small["rows"] == len(row_files()) > 0
    for path in row_files():
        os.utime(path, (1, 1))
    assert invoke("cache", "prune", "--older-than", "7d").stdout.endswith("left 0 rows (0 B)\n")


def test_clear_needs_a_yes_where_nobody_can_be_asked() -> None:
    run(TEXT)
    refused = invoke("cache", "clear")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert row_files()
    assert invoke("cache", "clear", "--yes").exit_code == 0
    assert row_files() == []


def test_warm_tells_tokens_and_time_and_that_it_was_there() -> None:
    first, again = invoke("cache", "warm", "prompt.txt"), invoke("cache", "warm", "prompt.txt")
    n_tokens = run(TEXT)["prompt_tokens"]
    assert first.stdout.startswith(f"kept {n_tokens} tokens, 0 of them known before (")
    assert again.stdout.startswith(f"{n_tokens} tokens were there already (")
    assert run(TEXT)["cached_tokens"] == n_tokens
    value = json.loads(invoke("cache", "warm", "-", "--json", stdin=TEXT + "\n").stdout)
    assert (value["was_there"], value["tokens"]) == (True, n_tokens)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["prune"], 2, "--to BYTES"),
        (["prune", "--to", "2 apples"], 2, "--to must be a size such as 2GiB"),
        (["prune", "--older-than", "soon"], 2, "--older-than must be an age such as 7d"),
        (["warm", "no-such-file.txt"], 2, "no-such-file.txt"),
        (["warm", "fake:plain"], 2, "min_tokens"),
        (["warm", "prompt.txt", "-o", "temperature=1"], 2, "sampling option"),
        (["warm", "prompt.txt", "-o", "cache=false"], 1, "cache=False"),
        (["warm", "prompt.txt", "-o", "cache_disk_bytes=0"], 1, "could not be written"),
        (["warm"], 2, "FILE"),
        (["verfy"], 2, "Did you mean 'verify'?"),
    ],
)
def test_errors_are_one_line(args: list[str], code: int, says: str) -> None:
    done = invoke("cache", *args)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert done.stderr.startswith("kvasir: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["stats", "ls", "verify", "prune", "clear"])
def test_a_folder_that_cannot_be_used_is_a_failure(name: str) -> None:
    Path("kv").write_text("a file, not a folder")
    done = invoke("cache", name, *(["--yes"] if name == "clear" else ["--to", "1"] if name == "prune" else []))
    assert (done.exit_code, done.stdout) == (1, "")
    assert "cannot be opened: disk" in done.stderr


def test_every_subcommand_has_help_with_examples() -> None:
    listed = invoke("cache", "--help").stdout
    for name in ("stats", "ls", "verify", "prune", "clear", "warm"):
        assert f"\n  {name} " in listed
        assert f"  kvasir cache {name}" in invoke("cache", name, "--help").stdout


def test_a_long_prompt_is_one_line_and_branches_are_drawn_apart() -> None:
    rows = [listed(f"{at}", f"{at - 1}", at) for at in range(300)]
    rows += [listed("left", "99", 100), listed("right", "99", 100)]
    branches = command._branches(rows)
    assert [(branch.depth, len(branch.rows)) for branch in branches] == [(0, 302), (1, 100), (2, 200), (2, 1), (2, 1)]
    assert [branch.above for branch in branches] == [None, 0, 1, 1, 1]


def listed(key: str, parent: str, at: int) -> Listed:
    return Listed(
        key=key, parent=parent, space="s", depth=at, start=at, end=at + 1, tier="disk", bytes=1, hits=0,
        last_used=0.0, leases=0, status="available", reason=None, path=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0), ("1024", 1024), ("2GiB", 2 << 30), ("2gib", 2 << 30), ("500MB", 500_000_000), ("1.5K", 1536),
        ("3 TiB", 3 << 40), ("7B", 7), ("10 kb", 10_000),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes("--to", text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1iB", "1XB", "1e3", "1 2", "inf"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(BadOption, match=r"--to must be a size"):
        parse_bytes("--to", text)


def test_ages() -> None:
    assert [parse_age("x", text) for text in ("45s", "30m", "12h", "7d", "2w", "1.5H")] == [
        45, 1800, 43_200, 604_800, 1_209_600, 5400,
    ]  # fmt: skip
    for text in ("", "7", "d", "-7d", "7 days", "1y"):
        with pytest.raises(BadOption, match="x must be an age"):
            parse_age("x", text)


def test_what_people_read() -> None:
    shown = [show_bytes(n) for n in (0, 1023, 1024, 1536, 200 << 10, 5 << 30, 3000 << 40)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "200 KiB", "5.0 GiB", "3000 TiB"]
    ages = [show_age(n) for n in (-1, 0, 59, 60, 7200, 90_000, 1_300_000)]
    assert ages == ["0s ago", "0s ago", "59s ago", "1m ago", "2h ago", "1d ago", "2w ago"]


# On a terminal


def on_terminal(*args: str, types: str = "") -> tuple[int, str]:
    """Run a real process on a terminal and type at it."""
    leader, follower = pty.openpty()
    os.write(leader, types.encode())
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir", *args],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(follower)
    seen = b""
    try:
        while piece := os.read(leader, 65536):
            seen += piece
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    return process.wait(60), seen.decode()


def test_on_a_terminal_clear_asks_and_ls_draws_a_tree() -> None:
    run(TEXT)
    code, seen = on_terminal("cache", "ls")
    assert code == 0
    assert "└── " in seen
    code, seen = on_terminal("cache", "clear", types="n\n")
    assert code == 1
    assert f"Delete {len(row_files())} rows (" in seen
    assert row_files()
    assert on_terminal("cache", "clear", types="y\n")[0] == 0
    assert row_files() == []
