"""The cache across processes, as a shell sees it, on real llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TEXT = "Once upon a time there was a king who had three daughters and no crown at all. " * 10


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"KVASIR_HOME": str(tmp_path / "home"), "KVASIR_CACHE_DIR": str(tmp_path / "kv")}


def kvasir(environ: dict[str, str], *args: str | Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "kvasir", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


def run(environ: dict[str, str], path: Path, *args: str) -> Any:
    sampling = ("--temperature", "0", "-n", "8", "--ignore-eos")
    return json.loads(kvasir(environ, "run", "-m", path, "--json", *sampling, *args, TEXT))


def cache(environ: dict[str, str], *args: str | Path, code: int = 0) -> Any:
    return json.loads(kvasir(environ, "cache", *args, "--json", code=code))


def test_the_same_prompt_in_a_second_process_is_a_disk_hit(
    tiny_llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    first = run(environ, tiny_llama)
    again = run(environ, tiny_llama)
    without = run(environ, tiny_llama, "--no-cache")
    n_prompt = first["usage"]["prompt_tokens"]
    assert [each["usage"]["cached_tokens"] for each in (first, again, without)] == [0, n_prompt, 0]
    assert again["tokens"] == first["tokens"] == without["tokens"]
    assert again["key"] == first["key"]
    assert without["key"] is None

    stats = cache(environ, "stats")
    assert (stats["hits_exact"], stats["misses"], stats["misses_by_reason"]) == (1, 1, {"absent": 1})
    assert stats["promotions"] > 0
    assert stats["prefill_saved_s"] > 0  # the second process has computed nothing, and knows what it would have cost
    assert stats["bytes_disk"] == sum(path.stat().st_size for path in tmp_path.rglob("*.row"))
    rows = cache(environ, "ls")
    assert first["key"] in {row["key"] for row in rows}
    assert {row["hits"] for row in rows} == {1}
    assert cache(environ, "verify")["bad"] == []


def test_without_a_folder_of_its_own_the_cache_is_in_the_store(
    tiny_llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    del environ["KVASIR_CACHE_DIR"]
    first, again = run(environ, tiny_llama), run(environ, tiny_llama)
    rows = list(tmp_path.rglob("*.row"))
    assert rows
    assert all(row.is_relative_to(environ["KVASIR_HOME"]) for row in rows)
    assert first["usage"]["cached_tokens"] == 0
    assert again["usage"]["cached_tokens"] > 0
    assert again["tokens"] == first["tokens"]


def test_a_corrupted_file_is_reported_removed_and_computed_again(
    tiny_llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    first = run(environ, tiny_llama)
    bad = next(row for row in cache(environ, "ls") if row["start"] == 256)
    content = bytearray(Path(bad["path"]).read_bytes())
    content[len(content) // 2] ^= 16
    Path(bad["path"]).write_bytes(content)

    assert f"removed {bad['path']}\n" in kvasir(environ, "cache", "verify", code=1)
    assert not Path(bad["path"]).exists()
    assert "bad: 0" in kvasir(environ, "cache", "verify")
    again = run(environ, tiny_llama)
    assert again["usage"]["cached_tokens"] == 256
    assert again["tokens"] == first["tokens"]
    assert Path(bad["path"]).exists()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_a_warmed_prompt_is_restored_for_every_kind_of_memory(
    kind: str, request: pytest.FixtureRequest, environ: dict[str, str], tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(f"tiny_{kind}")
    (tmp_path / "prompt.txt").write_text(TEXT + "\n")
    warm = ("warm", tmp_path / "prompt.txt", "-m", path)
    first, again = cache(environ, *warm), cache(environ, *warm)
    assert (first["was_there"], again["was_there"]) == (False, True)
    assert first["cached_tokens"] == 0
    # To warm it again runs its last token, and only plain memory can drop the end of a row: others begin a row earlier.
    assert again["cached_tokens"] >= 256
    # Who writes needs nothing but the rows, which end with the prompt, and the logits after it.
    assert run(environ, path)["usage"]["cached_tokens"] == first["tokens"]


def test_two_processes_at_once_lose_no_count(tiny_llama: Path, environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kvasir", "run", "-m", str(tiny_llama), "-n", "4", "--ignore-eos", TEXT]
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    stats = cache(environ, "stats")
    assert stats["hits"] + stats["misses"] == 2
    assert cache(environ, "verify")["bad"] == []
