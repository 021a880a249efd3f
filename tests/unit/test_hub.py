"""The hub path, with the real `huggingface_hub` against a hub on the loopback device."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.config import StoreSettings
from kvasir.errors import BadOption, ChecksumMismatch, ModelNotFound, NoSpace, Offline, StoreError
from kvasir.model import store
from kvasir.model.hub import gguf_files
from kvasir.model.reference import HubFile
from tests.unit.hub_server import COMMIT, Hub, serve

REF = "hf:owner/repo/model.gguf"
CONTENT = random.Random(0).randbytes(300_000)
CHUNK = 1 << 16


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serve(Hub()) as running:
        running.add("owner/repo", "model.gguf", CONTENT)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield running


@pytest.fixture
def home(tmp_path: Path) -> StoreSettings:
    return StoreSettings(home=tmp_path / "home")


def test_a_file_is_fetched_once_and_then_found(hub: Hub, home: StoreSettings) -> None:
    seen: list[tuple[int, int | None]] = []
    path = store.resolve(REF, home, progress=lambda done, total: seen.append((done, total)))
    assert path.name == "model.gguf"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    n_asked = len(hub.asked)
    assert store.resolve(REF, home) == path
    assert len(hub.asked) == n_asked
    [entry] = store.entries(home)
    assert (entry.reference, entry.sha256) == (REF, hashlib.sha256(CONTENT).hexdigest())


def test_an_interrupted_download_goes_on_with_a_range(hub: Hub, home: StoreSettings) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done > 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve(REF, home, progress=interrupt)
    assert store.entries(home) == []
    hub.asked.clear()
    assert store.resolve(REF, home).read_bytes() == CONTENT
    assert [each.byte_range for each in hub.downloads()] == [f"bytes={3 * CHUNK}-"]


def test_a_connection_that_breaks_off_is_taken_up_again_with_a_range(hub: Hub, home: StoreSettings) -> None:
    hub.cut_next_at = 2 * CHUNK + 10
    # The first request is a HEAD, which sends no body, so the download is what breaks.
    assert store.resolve(REF, home).read_bytes() == CONTENT
    first, second = hub.downloads()
    assert first.byte_range is None
    assert second.byte_range == f"bytes={2 * CHUNK}-"


def test_a_server_that_knows_no_ranges_sends_it_all_again(hub: Hub, home: StoreSettings) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve(REF, home, progress=interrupt)
    hub.ignores_ranges = True
    assert store.resolve(REF, home).read_bytes() == CONTENT


def test_a_file_that_changed_since_the_interruption_is_begun_anew(hub: Hub, home: StoreSettings) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.resolve(REF, home, progress=interrupt)
    newer = CONTENT[::-1]
    hub.add("owner/repo", "model.gguf", newer)
    assert store.resolve(REF, home).read_bytes() == newer


def test_a_wrong_checksum_keeps_nothing(hub: Hub, home: StoreSettings) -> None:
    hub.lies = True
    with pytest.raises(ChecksumMismatch, match=r"should have sha256 [0-9a-f]{64}, but [0-9a-f]{64} came"):
        store.resolve(REF, home)
    assert store.entries(home) == []
    assert not list(home.home.rglob("*.gguf.*.partial"))
    hub.lies = False
    assert store.resolve(REF, home).read_bytes() == CONTENT


def test_the_hash_the_caller_wants_is_checked_too(hub: Hub, home: StoreSettings) -> None:
    with pytest.raises(ChecksumMismatch):
        store.resolve(REF, home, sha256="0" * 64)
    assert store.entries(home) == []
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert store.resolve(REF, home, sha256=digest.upper()).read_bytes() == CONTENT
    with pytest.raises(ChecksumMismatch):
        store.resolve(REF, home, sha256="0" * 64)
    with pytest.raises(BadOption, match="64 hexadecimal digits"):
        store.resolve(REF, home, sha256="abc")


def test_a_private_repository_needs_the_token(hub: Hub, home: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(StoreError, match=r"answered 401 for hf:owner/repo/model.gguf.*HF_TOKEN"):
        store.resolve(REF, home)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert store.resolve(REF, home).read_bytes() == CONTENT


def test_a_gated_repository_says_what_to_do(hub: Hub, home: StoreSettings) -> None:
    hub.gated = True
    with pytest.raises(StoreError, match="is gated; accept its terms"):
        store.resolve(REF, home)


def test_a_missing_file_is_answered_with_the_files_there_are(hub: Hub, home: StoreSettings) -> None:
    with pytest.raises(ModelNotFound, match=r"has no 'modell.gguf'; it holds model.gguf. Did you mean 'model.gguf'\?"):
        store.resolve("hf:owner/repo/modell.gguf", home)


def test_a_missing_repository_or_revision_is_not_found(hub: Hub, home: StoreSettings) -> None:
    with pytest.raises(ModelNotFound, match="no repository 'owner/gone'"):
        store.resolve("hf:owner/gone/model.gguf", home)
    with pytest.raises(ModelNotFound, match="has no revision 'v9'"):
        store.resolve("hf:owner/repo/model.gguf@v9", home)


def test_a_repository_alone_is_answered_with_its_gguf_files(hub: Hub, home: StoreSettings) -> None:
    hub.add("owner/repo", "other.gguf", b"x")
    hub.add("owner/repo", "README.md", b"x")
    with pytest.raises(
        BadOption, match=r"must name a file, .*hf:owner/repo/model.gguf; it holds model.gguf, other.gguf\."
    ):
        store.resolve("hf:owner/repo", home)
    assert gguf_files(HubFile("owner/repo", None)) == ["model.gguf", "other.gguf"]


def test_revisions_are_kept_apart(hub: Hub, home: StoreSettings) -> None:
    hub.add("owner/repo", "model.gguf", b"old", revision="v1")
    hub.files["owner/repo", COMMIT, "model.gguf"] = b"old"
    old = store.resolve("hf:owner/repo/model.gguf@v1", home)
    hub.files["owner/repo", COMMIT, "model.gguf"] = CONTENT
    new = store.resolve(REF, home)
    assert (old.read_bytes(), new.read_bytes()) == (b"old", CONTENT)


def test_a_split_model_is_fetched_whole(hub: Hub, home: StoreSettings) -> None:
    hub.add("owner/repo", "big-00001-of-00002.gguf", b"one")
    hub.add("owner/repo", "big-00002-of-00002.gguf", b"two!")
    path = store.resolve("hf:owner/repo/big-00001-of-00002.gguf", home)
    assert path.read_bytes() == b"one"
    assert (path.parent / "big-00002-of-00002.gguf").read_bytes() == b"two!"
    assert store.entries(home)[0].size_bytes == 7


def test_no_network_is_offline(hub: Hub, home: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    with pytest.raises(Offline, match=r"could not be reached for hf:owner/repo/model\.gguf"):
        store.resolve(REF, home)


def test_a_hub_in_trouble_is_a_store_error(hub: Hub, home: StoreSettings) -> None:
    hub.status = 418
    with pytest.raises(StoreError, match="the hub answered 418"):
        store.resolve(REF, home)


def test_offline_asks_nobody_and_says_which_command_fetches(hub: Hub, home: StoreSettings) -> None:
    offline = StoreSettings(home=home.home, offline=True)
    with pytest.raises(
        Offline, match=r"is not in the store .* forbids the network; .*kvasir pull hf:owner/repo/model.gguf"
    ):
        store.resolve(REF, offline)
    assert hub.asked == []
    path = store.resolve(REF, home)
    assert store.resolve(REF, offline) == path


def test_hf_hub_offline_asks_nobody_and_is_named(hub: Hub, home: StoreSettings, tmp_path: Path) -> None:
    """In a process of its own, for the library reads the variable when it is imported."""
    program = f"""
from kvasir.errors import Offline
from kvasir.model.store import resolve
try:
    print(resolve({REF!r}))
except Offline as error:
    print("offline:", error)
"""

    def answer(value: str) -> str:
        environ = os.environ | {"HF_ENDPOINT": hub.url, "KVASIR_HOME": str(home.home), "HF_HOME": str(tmp_path / "hf")}
        environ |= {"HF_HUB_OFFLINE": value, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    refused = f"offline: {REF} is not in the store and HF_HUB_OFFLINE forbids the network; unset it once."
    assert answer("1") == refused
    assert hub.asked == []
    fetched = answer("0")
    assert Path(fetched).read_bytes() == CONTENT
    assert answer("1") == fetched


def test_a_full_disk_is_told_before_the_first_byte(
    hub: Hub, home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("kvasir.model.transfer.shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(NoSpace, match=r"needs 0.3 MB more in .*, which has 0.0 MB free; make room or move the store"):
        store.resolve(REF, home)
    assert hub.downloads() == []


def test_without_huggingface_hub_the_error_says_how_to_get_it(
    home: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(StoreError, match=r"pip install 'kvasir-llm\[hub\]'"):
        store.resolve(REF, home)


def test_two_processes_that_ask_at_once_make_one_download(hub: Hub, home: StoreSettings, tmp_path: Path) -> None:
    hub.delay_s = 0.3
    environ = os.environ | {"HF_ENDPOINT": hub.url, "KVASIR_HOME": str(home.home), "HF_HOME": str(tmp_path / "hf")}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = f"from kvasir.model.store import resolve; print(resolve({REF!r}))"
    askers = [
        subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [asker.communicate(timeout=60)[0] for asker in askers]
    assert answers[0] == answers[1]
    assert Path(answers[0].strip()).read_bytes() == CONTENT
    assert len(hub.downloads()) == 1
