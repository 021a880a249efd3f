"""The wheel that `pip` builds: it holds the extension and the licences of what is linked in, and works by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Run without site, so that this clone's own installation is not found.
USE_IT = """
import sys
sys.path[:0] = sys.argv[1:3]
import kvasir
from kvasir import native
print(kvasir.__file__)
print(native.Model.load(sys.argv[3]).architecture)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)  # the extension is compiled, and llama.cpp too on a machine that has not built it yet
def test_a_wheel_is_whole(tmp_path: Path, tiny_llama: Path) -> None:
    wheel = built_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "unpacked")
    assert len([name for name in names if name.startswith("kvasir/native/_native.") and name.endswith(".so")]) == 1
    licences = ("llama.cpp", "cpp-httplib", "jsonhpp", "nanobind")
    assert {f"kvasir/licenses/LICENSE-{name}" for name in licences} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"kvasir/py.typed", "kvasir/native/_native.pyi"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvasir", "kvasir_llm"}
    packages = sysconfig.get_path("purelib")
    command = [sys.executable, "-S", "-c", USE_IT, str(tmp_path / "unpacked"), packages, str(tiny_llama)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [str(tmp_path / "unpacked" / "kvasir" / "__init__.py"), "llama"]


def built_wheel(folder: Path) -> Path:
    """Build in a folder of its own: the clone's build stays as it is."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder / "wheels"), "--config-settings", f"build-dir={folder / 'build'}"]
    # CMake and Ninja may be installed into the environment alone.
    environ = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "wheels").iterdir()
    return wheel
