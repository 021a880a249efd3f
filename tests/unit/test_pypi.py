"""The package path, with the real pip: on a local folder of wheels, and once with the default model's package."""

from __future__ import annotations

import base64
import hashlib
import random
import zipfile
from pathlib import Path

import pytest

from kvasir.config import StoreSettings, store_settings
from kvasir.errors import ChecksumMismatch, ModelNotFound, Offline, StoreError
from kvasir.model import pypi, store
from kvasir.model.reference import KNOWN, Member, Packaged

PARTS = [random.Random(seed).randbytes(50_000) for seed in range(3)]
JOINED = "pypi:" + "+".join(f"kv-part{n}==1.0/kv/x.gguf.part{n}" for n in (1, 2, 3))


def write_wheel(folder: Path, package: str, version: str, files: dict[str, bytes], requires: str = "") -> Path:
    """A wheel that pip accepts, holding these files."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{requires}"
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for number, part in enumerate(PARTS, start=1):
        write_wheel(folder, f"kv-part{number}", "1.0", {f"kv/x.gguf.part{number}": part})
    return folder


@pytest.fixture
def home(tmp_path: Path) -> StoreSettings:
    return StoreSettings(home=tmp_path / "home")


def test_a_member_is_taken_out_of_its_wheel(wheels: Path, home: StoreSettings) -> None:
    write_wheel(wheels, "kv-one", "2.0", {"kv/model.gguf": b"GGUF..."})
    path = store.resolve("pypi:kv-one==2.0/kv/model.gguf", home)
    assert (path.name, path.read_bytes()) == ("model.gguf", b"GGUF...")
    assert {each.name for each in path.parent.iterdir()} == {"model.gguf", "entry.json"}


def test_parts_are_joined_in_the_order_they_are_named(wheels: Path, home: StoreSettings) -> None:
    seen: list[tuple[int, int | None]] = []
    path = store.resolve(JOINED, home, progress=lambda done, total: seen.append((done, total)))
    assert (path.name, path.read_bytes()) == ("x.gguf", b"".join(PARTS))
    assert seen[-1] == (150_000, None)


def test_parts_that_are_here_are_not_fetched_again(wheels: Path, home: StoreSettings) -> None:
    missing = next(wheels.glob("kv_part3*"))
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(ModelNotFound, match=r"kv-part3==1\.0"):
        store.resolve(JOINED, home)
    missing.write_bytes(content)
    for done in wheels.glob("kv_part[12]*"):
        done.unlink()
    assert store.resolve(JOINED, home).read_bytes() == b"".join(PARTS)


def test_a_part_cut_short_by_a_crash_is_taken_anew(wheels: Path, tmp_path: Path) -> None:
    reference = Packaged(tuple(Member(f"kv-part{n}", "1.0", f"kv/x.gguf.part{n}") for n in (1, 2, 3)))
    work = tmp_path / "work"
    work.mkdir()
    (work / "x.gguf").write_bytes(PARTS[0] + PARTS[1][:77])
    (work / "parts.json").write_text("[50000]")
    joined = pypi.fetch(reference, work, total=None, progress=lambda done, total: None)
    assert joined.read_bytes() == b"".join(PARTS)


def test_a_package_made_for_another_python_will_do(wheels: Path, home: StoreSettings) -> None:
    write_wheel(wheels, "kv-old", "1.0", {"m.gguf": b"x"}, requires="Requires-Python: <3.0\n")
    assert store.resolve("pypi:kv-old==1.0/m.gguf", home).read_bytes() == b"x"


def test_a_package_is_never_installed_nor_its_needs_fetched(wheels: Path, home: StoreSettings) -> None:
    write_wheel(wheels, "kv-needy", "1.0", {"m.gguf": b"x"}, requires="Requires-Dist: no-such-package-at-all\n")
    assert store.resolve("pypi:kv-needy==1.0/m.gguf", home).read_bytes() == b"x"


def test_a_missing_member_is_answered_with_what_there_is(wheels: Path, home: StoreSettings) -> None:
    with pytest.raises(
        ModelNotFound, match=r"kv-part1==1\.0 has no 'kv/x.gguf'; it holds kv/x.gguf.part1\. Did you mean"
    ):
        store.resolve("pypi:kv-part1==1.0/kv/x.gguf", home)


def test_a_missing_version_is_answered_with_those_there_are(wheels: Path, home: StoreSettings) -> None:
    with pytest.raises(ModelNotFound, match=r"no package index .* has a wheel of kv-part1==9\.9; it has 1\.0\."):
        store.resolve("pypi:kv-part1==9.9/kv/x.gguf", home)
    with pytest.raises(ModelNotFound, match=r"has a wheel of kv-none==1\.0\.$"):
        store.resolve("pypi:kv-none==1.0/kv/x.gguf", home)


def test_a_damaged_wheel_is_refused_and_leaves_nothing(wheels: Path, home: StoreSettings) -> None:
    wheel = write_wheel(wheels, "kv-bad", "1.0", {"m.gguf": b"a" * 1000})
    wheel.write_bytes(wheel.read_bytes().replace(b"a" * 1000, b"a" * 999 + b"b"))
    with pytest.raises(ChecksumMismatch, match=r"the wheel of kv-bad==1\.0 is damaged"):
        store.resolve("pypi:kv-bad==1.0/m.gguf", home)
    assert store.entries(home) == []


def test_an_index_out_of_reach_is_offline(wheels: Path, home: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(Offline, match=r"pip could not reach the package index for kv-part1==1\.0"):
        store.resolve("pypi:kv-part1==1.0/kv/x.gguf.part1", home)


def test_offline_starts_no_pip(wheels: Path, home: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(Offline, match="kvasir pull smollm2"):
        store.resolve("smollm2", StoreSettings(home=home.home, offline=True))


def test_without_pip_the_error_says_how_to_get_it(
    wheels: Path, home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match="-m ensurepip"):
        store.resolve("pypi:kv-part1==1.0/kv/x.gguf.part1", home)


def test_a_download_given_up_by_its_progress_ends_pip(
    wheels: Path, home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pypi, "POLL_S", 0.001)

    def give_up(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve(JOINED, home, progress=give_up)
    assert not list(home.home.rglob("*.whl"))


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (["m/model.gguf"], "model.gguf"),
        (["m/model.bin"], "model.bin.gguf"),
        (["x.gguf.part1", "x.gguf.part2"], "x.gguf"),
        (["x.part01.gguf", "x.part02.gguf"], "x.gguf"),
        (["part1", "part2"], "model.gguf"),
    ],
)
def test_the_joined_file_is_named_after_its_first_part(members: list[str], name: str) -> None:
    assert pypi.file_name(Packaged(tuple(Member("a", "1", member) for member in members))) == name


def test_the_default_model_comes_from_its_real_package() -> None:
    path = store.resolve("smollm2", store_settings())
    assert path.stat().st_size == KNOWN["smollm2"].size_bytes
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert store.show("smollm2").sha256 == KNOWN["smollm2"].sha256
