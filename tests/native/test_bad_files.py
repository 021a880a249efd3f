"""Files that are no good: each is refused with a typed error, nothing leaks, and the process lives."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kvasir import native
from kvasir.errors import ModelLoadError, ModelNotFound
from tests.models import WRITERS
from tests.rights import as_somebody_else

ROOT = Path(__file__).parents[2]
OTHERS = [name for name in WRITERS if name not in ("llama", "rank")]
MOST_DEATHS_SHOWN = 5
# The allocator's own ups and downs are about 6 MB; fifty leaked models or contexts would be 20 MB or more.
MOST_GROWTH_BYTES = 10 << 20


def refused(path: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        native.Model.load(str(path))
    return str(caught.value)


@pytest.mark.parametrize("name", ["missing.gguf", "no/such/folder/x.gguf"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises((ModelNotFound, ModelLoadError), match=name):
        native.Model.load(str(tmp_path / name))


def test_a_path_through_a_file_is_named(tiny_llama: Path) -> None:
    with pytest.raises((ModelNotFound, ModelLoadError), match="inside"):
        native.Model.load(str(tiny_llama / "inside"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert "empty" in refused(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "folder" in refused(tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_random_bytes_are_refused(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    path = tmp_path / "noise.gguf"
    path.write_bytes(source.randbytes(source.randrange(1, 20_000)))
    assert str(path) in refused(path)


@pytest.mark.parametrize("seed", range(10))
def test_random_bytes_behind_a_good_beginning_are_refused(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + random.Random(seed).randbytes(5000))
    assert str(path) in refused(path)


@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_file_cut_short_is_refused(tiny_llama: Path, tiny_mamba: Path, tmp_path: Path, name: str, part: int) -> None:
    data = {"llama": tiny_llama, "mamba": tiny_mamba}[name].read_bytes()
    path = tmp_path / "cut.gguf"
    # Ten cuts in the header, which is where most fields are, and ten over the whole file.
    path.write_bytes(data[: part * 600 + 1] if part < 10 else data[: len(data) * (part - 9) // 10 - 1])
    assert str(path) in refused(path)


@pytest.mark.parametrize("version", [0, 1, 4, 99, 0x03000000, 0xFFFFFFFF])
def test_another_version_of_the_format_is_refused(tiny_llama: Path, tmp_path: Path, version: int) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + tiny_llama.read_bytes()[8:])
    assert "version" in refused(path)


def test_a_file_that_may_not_be_read_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    path.chmod(0)
    with as_somebody_else():
        assert str(path) in refused(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    code = (
        "import sys; from kvasir import native, errors\n"
        "try: native.Model.load(sys.argv[1])\n"
        "except errors.ModelLoadError: print('refused')"
    )
    command = [sys.executable, "-c", code, str(pipe)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert child.stdout == "refused\n"


@pytest.mark.parametrize("arch", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_spoiled_files_are_refused_or_work_and_never_kill_the_process(arch: str, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    deaths: list[str] = []
    first = 0
    while len(deaths) < MOST_DEATHS_SHOWN:
        child = _try_mutations(arch, tmp_path, first)
        lines = child.stdout.splitlines()
        outcomes.update(line.removeprefix("got ") for line in lines if line.startswith("got "))
        if lines[-1] == "done":
            break
        last = [line for line in lines if line.startswith("try ")][-1]
        deaths.append(f"{last}: exit code {child.returncode}, {child.stderr.strip().splitlines()[-1:]}")
        first = int(last.split()[1]) + 1
    assert deaths == []
    assert outcomes["refused"] > 300
    assert outcomes["loaded"] > 100


def _try_mutations(arch: str, folder: Path, first: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.native.mutations", arch, str(folder), str(first)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def _grown_after(n: int, path: Path, *, good: bool) -> tuple[int, int]:
    """Return how many bytes and open files this process gained by loading a file `n` times.

    As many loads go before: until then malloc's arenas grow, and afterwards only leaks do.
    """
    me = psutil.Process()
    memory = files = 0
    for i in range(2 * n):
        if i == n:
            memory, files = me.memory_info().rss, me.num_fds()
        if good:
            _load_and_close(path)
        else:
            refused(path)
    return me.memory_info().rss - memory, me.num_fds() - files


def _load_and_close(path: Path) -> None:
    model = native.Model.load(str(path), use_mmap=False)
    context = native.Context(model, n_ctx=2048)
    context.step([native.Row(0, 0, [1, 2, 3], output=True)])
    context.close()
    model.close()


def test_loading_and_closing_fifty_times_returns_the_memory(tiny_llama: Path) -> None:
    grown, files = _grown_after(50, tiny_llama, good=True)
    assert grown < MOST_GROWTH_BYTES
    assert files == 0


def test_failing_to_load_two_hundred_times_leaks_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_llama.read_bytes()[:300_000])
    grown, files = _grown_after(200, path, good=False)
    assert grown < MOST_GROWTH_BYTES
    assert files == 0
