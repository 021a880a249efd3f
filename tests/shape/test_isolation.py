"""Our llama.cpp keeps to itself: nothing leaves the extension file, and another one in the process does no harm."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

# Loads and decodes with the libraries it is told to use, turn by turn, and prints what each of them made.
PROGRAM = """
import importlib, json, sys

path, *order = sys.argv[1:]
for name in order:
    importlib.import_module(name)


def ours():
    from kvasir import native

    model = native.Model.load(path)
    context = native.Context(model, n_ctx=256, threads=1)
    params = native.SamplerParams()
    params.temperature = 0.0
    sampler = native.Sampler(model.vocab, params)
    tokens, pos = model.vocab.tokenize("Once upon a time"), 0
    for _ in range(12):
        tokens, pos = context.step([native.Row(0, pos, tokens, sampler=sampler)]).tokens, pos + len(tokens)
        yield tokens[0], context.logits(0).tobytes().hex()


def theirs():
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    for i in range(12):
        asked = {"prompt": "Once upon a time" + " and on" * i, "max_tokens": 4, "temperature": 0}
        yield server.handle_completions(asked)["choices"][0]["text"]


makers = {"kvasir.native": ours(), "xllamacpp": theirs()}
made = {name: [] for name in order}
for _ in range(12):
    for name in order:
        made[name].append(next(makers[name]))
print(json.dumps(made))
"""


def made_by(model: Path, *order: str) -> dict[str, list[object]]:
    command = [sys.executable, "-c", PROGRAM, str(model), *order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return made


def extension() -> Path:
    found = importlib.util.find_spec("kvasir.native._native")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


@pytest.mark.parametrize("order", [("xllamacpp", "kvasir.native"), ("kvasir.native", "xllamacpp")])
def test_xllamacpp_and_kvasir_make_in_one_process_what_each_makes_alone(
    tiny_llama: Path, order: tuple[str, str]
) -> None:
    together = made_by(tiny_llama, *order)
    assert together == made_by(tiny_llama, "kvasir.native") | made_by(tiny_llama, "xllamacpp")
    assert [len(made) for made in together.values()] == [12, 12]


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
