"""The cached libraries: which backend, which key, and that a build is whole, single and clear about its failures."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import llama_cpp
import llama_libs
import steps
from llama_source import Source

SOURCE = Source(Path("anywhere"), "identity", "commit")

# Stands in for CMake: --build takes a moment, notes its turn, and would trip over a second one in the same folder.
FAKE_CMAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "cmake version 3.25.1"; exit 0; fi
if [ "$1" = --build ]; then
  mkdir "$2/busy" || exit 9
  sleep 0.3
  echo built >>"$2/builds"
  rmdir "$2/busy"
fi
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose cmake is a script and whose compiler is the real one."""
    cmake = tmp_path / "cmake"
    cmake.write_text(FAKE_CMAKE)
    cmake.chmod(0o755)
    return {"KVASIR_HOME": str(tmp_path / "home"), "KVASIR_BACKEND": "cpu", "KVASIR_CMAKE": str(cmake)}


def fails_with(environ: dict[str, str], text: str, code: int = 1) -> None:
    Path(environ["KVASIR_CMAKE"]).write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")


def test_libraries_are_built_once_and_found_again(environ: dict[str, str]) -> None:
    folder = llama_libs.libraries(SOURCE, environ)
    assert llama_libs.libraries(SOURCE, environ) == folder
    assert (folder / "builds").read_text() == "built\n"
    assert (folder / "complete").is_file()


def test_an_unfinished_build_is_taken_up_again(environ: dict[str, str]) -> None:
    folder = llama_libs.libraries(SOURCE, environ)
    (folder / "complete").unlink()
    assert llama_libs.libraries(SOURCE, environ) == folder
    assert (folder / "builds").read_text() == "built\nbuilt\n"


def test_two_builds_at_once_are_one_build(environ: dict[str, str], tmp_path: Path) -> None:
    """Two processes, as two clones would be: the second waits for the first and finds its work done."""
    tree = tmp_path / "llama.cpp"
    (tree / "include").mkdir(parents=True)
    (tree / "include" / "llama.h").write_text("")
    command = [sys.executable, llama_cpp.__file__, "libs"]
    own = environ | {"KVASIR_LLAMA_CPP_DIR": str(tree), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    builds = [
        subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [build.communicate() for build in builds]
    assert [build.returncode for build in builds] == [0, 0, 0], outputs
    folders = {stdout.strip() for stdout, _ in outputs}
    assert len(folders) == 1
    assert (Path(folders.pop()) / "builds").read_text() == "built\n"


def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    code = "\n".join(
        [
            f"import pathlib, sys, time; sys.path.insert(0, {str(Path(steps.__file__).parent)!r}); import steps",
            f"with steps.locked(pathlib.Path({str(tmp_path / 'libs')!r})):",
            "    print('held', flush=True); time.sleep(60)",
        ]
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    before = time.monotonic()
    with steps.locked(tmp_path / "libs"):
        assert time.monotonic() - before < 5


def test_a_disk_that_fills_up_under_the_compiler_is_one_line(environ: dict[str, str]) -> None:
    fails_with(environ, "fatal error: error writing to /cache/x.s: No space left on device")
    with pytest.raises(steps.Failure, match=r"no space left on the disk of .*KVASIR_HOME"):
        llama_libs.libraries(SOURCE, environ)


def test_a_compiler_killed_for_memory_is_one_line(environ: dict[str, str]) -> None:
    fails_with(environ, "c++: fatal error: Killed signal terminated program cc1plus")
    with pytest.raises(steps.Failure, match="CMAKE_BUILD_PARALLEL_LEVEL=1"):
        llama_libs.libraries(SOURCE, environ)


def test_a_failed_build_leaves_no_complete_mark(environ: dict[str, str]) -> None:
    fails_with(environ, "error: expected ';'")
    with pytest.raises(steps.Failure, match=r"configuring llama\.cpp failed"):
        llama_libs.libraries(SOURCE, environ)
    assert not list(steps.build_home(environ).rglob("complete"))


def test_a_folder_that_may_not_be_written_names_the_way_out(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(steps.Failure, match=r"cannot write .*KVASIR_HOME"):
        llama_libs.libraries(SOURCE, environ | {"KVASIR_HOME": str(tmp_path / "file")})


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(
        steps.Failure, match=r"no C\+\+ compiler found; install one, for example with 'apt install g\+\+'"
    ):
        llama_libs.find_tools({})


def test_on_macos_the_compiler_comes_from_apple() -> None:
    assert "xcode-select --install" in llama_libs.how_to_install_compiler("darwin")


def test_a_missing_cmake_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_libs, "first_on_path", lambda *names: None if "cmake" in names else "/bin/true")
    with pytest.raises(steps.Failure, match="pip install cmake ninja"):
        llama_libs.find_tools({})


@pytest.mark.parametrize("name", llama_libs.BACKENDS)
def test_the_users_backend_is_taken(name: str) -> None:
    assert llama_libs.choose_backend({"KVASIR_BACKEND": name}) == name


def test_an_unknown_backend_is_refused_with_a_suggestion() -> None:
    with pytest.raises(steps.Failure, match=r"one of cpu, cuda, metal, vulkan\. Did you mean 'cuda'\?"):
        llama_libs.choose_backend({"KVASIR_BACKEND": "Cuda12"})


@pytest.mark.parametrize(
    ("nvcc", "device", "chosen"),
    [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu"), (False, False, "cpu")],
)
def test_cuda_needs_both_the_compiler_and_a_device(
    monkeypatch: pytest.MonkeyPatch, nvcc: bool, device: bool, chosen: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvcc" if nvcc and name == "nvcc" else None)
    monkeypatch.setattr(llama_libs, "has_nvidia_device", lambda: device)
    assert llama_libs.choose_backend({}, "linux") == chosen


def test_macos_is_metal() -> None:
    assert llama_libs.choose_backend({}, "darwin") == "metal"


@pytest.mark.parametrize(("printed", "wanted"), [("9.0\n8.9\n9.0\n", "89;90"), ("", "native"), ("garbage", "native")])
def test_cuda_kernels_are_built_for_this_machines_devices(
    monkeypatch: pytest.MonkeyPatch, printed: str, wanted: str
) -> None:
    monkeypatch.setattr(llama_libs, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(llama_libs, "output_of", lambda *command: printed)
    assert llama_libs.cuda_architectures() == (f"-DCMAKE_CUDA_ARCHITECTURES={wanted}",)


# Programs of one line each: what pkg-config knows, and a compiler that notes its arguments and finds cblas.h or not.
KNOWS_OPENBLAS = '[ "$1" = --modversion ] && echo 0.3.21 || echo -I/there -lopenblas'
KNOWS_NOTHING = "exit 1"
COMPILES = 'echo "$@" >"$0.arguments"'
LACKS_THE_HEADER = "exit 1"


@pytest.mark.parametrize(
    ("pkg_config", "compiler", "taken"),
    [
        (KNOWS_OPENBLAS, COMPILES, True),
        (KNOWS_OPENBLAS, LACKS_THE_HEADER, False),
        (KNOWS_NOTHING, COMPILES, False),
        (None, COMPILES, False),
    ],
)
def test_openblas_is_taken_where_a_program_links_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pkg_config: str | None, compiler: str, taken: bool
) -> None:
    for name, line in (("pkg-config", pkg_config), ("cc", compiler)):
        if line is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    tools = llama_libs.Tools(cc=str(tmp_path / "cc"), cxx="c++", cmake="cmake", ninja=None)
    wanted = ("-DGGML_BLAS=ON", "-DGGML_BLAS_VENDOR=OpenBLAS") if taken else ()
    assert llama_libs.openblas_args(tools) == wanted
    assert llama_libs.backend_args("cpu", tools) == wanted
    assert llama_libs.backend_args("vulkan", tools) == ("-DGGML_VULKAN=ON",)
    if taken:
        assert (tmp_path / "cc.arguments").read_text().endswith(" -I/there -lopenblas\n")


def test_openblas_is_not_asked_for_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(llama_libs, "output_of", lambda *command: pytest.fail("asked pkg-config"))
    tools = llama_libs.Tools(cc="cc", cxx="c++", cmake="cmake", ninja=None)
    assert llama_libs.openblas_args(tools) == ()


@pytest.mark.parametrize("field", ["source", "backend", "args", "compilers", "wrapper", "cpu"])
def test_each_part_of_a_recipe_changes_the_key(field: str) -> None:
    one = llama_libs.Recipe("s", "cpu", ("-DA=1",), ("gcc 12",), "text", "avx2")
    other = ("x",) if isinstance(getattr(one, field), tuple) else "cuda"
    assert llama_libs.Recipe(**(asdict(one) | {field: other})).key != one.key


def test_the_users_cmake_arguments_come_last_and_so_win(environ: dict[str, str]) -> None:
    tools = llama_libs.find_tools(environ)
    made = llama_libs.recipe(
        SOURCE, tools, environ | {"KVASIR_CMAKE_ARGS": "-DGGML_OPENMP=ON '-DCMAKE_C_FLAGS=-g -O1'"}
    )
    arguments = llama_libs.cmake_arguments(SOURCE, made, tools, peers=False)
    assert arguments[-2:] == ["-DGGML_OPENMP=ON", "-DCMAKE_C_FLAGS=-g -O1"]


def test_broken_quotes_in_the_users_arguments_are_one_line() -> None:
    with pytest.raises(steps.Failure, match="KVASIR_CMAKE_ARGS cannot be read"):
        llama_libs.user_args({"KVASIR_CMAKE_ARGS": "-DX='open"})


def test_one_compiler_under_two_names_is_one_key() -> None:
    assert llama_libs.compiler_identity("c++") == llama_libs.compiler_identity("c++")
    with pytest.raises(steps.Failure, match="does not run"):
        llama_libs.compiler_identity("no-such-compiler")


def test_commands_print_faults_as_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVASIR_LLAMA_CPP_DIR", "/no/such/tree")
    assert llama_cpp.main(["libs"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvasir: error: KVASIR_LLAMA_CPP_DIR=")
