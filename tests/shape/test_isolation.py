"""Our llama.cpp keeps to itself: nothing leaves the extension file, and another one in the process does no harm."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import llama_source

# Both libraries tokenise with their own vocabulary code; the other's symbols must not get in the way.
USE_BOTH = """
import {first}
import {second}
import kvasir.native as native
import xllamacpp
model = native.Model.load({vocabulary!r}, vocab_only=True)
tokens = model.vocab.tokenize("Hello world")
assert model.vocab.detokenize(tokens, remove_special=True).strip() == b"Hello world"
assert xllamacpp.__version__
model.close()
print("both", len(tokens))
"""


def extension() -> Path:
    found = importlib.util.find_spec("kvasir.native._native")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


@pytest.mark.parametrize("order", [("xllamacpp", "kvasir.native"), ("kvasir.native", "xllamacpp")])
def test_xllamacpp_and_kvasir_work_in_one_process(order: tuple[str, str]) -> None:
    vocabulary = llama_source.source(llama_source.read_pin()).folder / "models" / "ggml-vocab-llama-spm.gguf"
    code = USE_BOTH.format(first=order[0], second=order[1], vocabulary=str(vocabulary))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("both")


def test_only_the_modules_entry_point_leaves_the_extension() -> None:
    flags = ["-gU"] if sys.platform == "darwin" else ["-D", "--defined-only"]
    listing = subprocess.run(["nm", *flags, extension()], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].lstrip("_") for line in listing.splitlines() if line.strip()}
    assert names == {"PyInit__native"}


def test_no_openmp_runtime_comes_with_the_extension() -> None:
    lister = ["otool", "-L"] if sys.platform == "darwin" else ["ldd"]
    libraries = subprocess.run([*lister, extension()], capture_output=True, text=True, check=True).stdout
    assert "libgomp" not in libraries
    assert "libomp" not in libraries


def test_the_licences_of_what_is_linked_in_travel_with_the_package() -> None:
    licences = {path.name for path in (extension().parent.parent / "licenses").iterdir()}
    assert {"LICENSE-llama.cpp", "LICENSE-cpp-httplib", "LICENSE-jsonhpp", "LICENSE-nanobind"} <= licences
