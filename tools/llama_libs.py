"""llama.cpp's static libraries in the cache folder, one build per distinct `Recipe`.

Owns the choice of backend and flags, the key they give, and the folder under that key. A folder counts only once its
`complete` mark is there, which is written last; until then the next build takes the unfinished work up under the same
lock. Linking the archives is the top CMakeLists.txt's affair.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_source import Source
from steps import Failure, build_home, disk_faults, locked, run_in_sight, say

WRAPPER = Path(__file__).resolve().parent.parent / "native" / "llama"
BACKENDS = ("cpu", "cuda", "metal", "vulkan")
PEERS = ("llama-bench", "llama-batched-bench", "llama-server")

# A unity batch of llama.cpp's model files peaks at about 1.3 GB in gcc 12; two at once on a small machine would swap.
JOB_BYTES = 3 << 29


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the bytes of the libraries. `cpu` is in it because ggml compiles for this very machine."""

    source: str
    backend: str
    args: tuple[str, ...]
    compilers: tuple[str, ...]
    wrapper: str
    cpu: str

    @property
    def key(self) -> str:
        """Name of the folder: readable backend, then a hash of everything."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.backend}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs in use. `ninja` may be absent; make then does the work."""

    cc: str
    cxx: str
    cmake: str
    ninja: str | None


def find_tools(environ: Mapping[str, str] = os.environ) -> Tools:
    """The compilers and CMake, or a line that says what to install."""
    cxx = environ.get("CXX") or first_on_path("c++", "g++", "clang++")
    cc = environ.get("CC") or first_on_path("cc", "gcc", "clang")
    if cxx is None or cc is None:
        raise Failure(f"no C++ compiler found; {how_to_install_compiler()}")
    cmake = environ.get("KVASIR_CMAKE") or first_on_path("cmake")
    if cmake is None:
        raise Failure("no cmake found; run 'pip install cmake ninja' (or use 'make build', which does)")
    return Tools(cc=cc, cxx=cxx, cmake=cmake, ninja=environ.get("KVASIR_NINJA") or first_on_path("ninja"))


def first_on_path(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


def how_to_install_compiler(system: str = sys.platform) -> str:
    if system == "darwin":
        return "install Apple's with 'xcode-select --install'"
    managers = {
        "apt-get": "apt install g++",
        "dnf": "dnf install gcc-c++",
        "apk": "apk add g++",
        "pacman": "pacman -S gcc",
    }
    command = next((command for name, command in managers.items() if shutil.which(name)), "apt install g++")
    return f"install one, for example with '{command}'"


def choose_backend(environ: Mapping[str, str] = os.environ, system: str = sys.platform) -> str:
    """The backend the user named, else the one this machine can run."""
    if named := environ.get("KVASIR_BACKEND"):
        return known_backend(named)
    if system == "darwin":
        return "metal"
    # nvcc alone is not enough: build hosts have the toolkit and no device, and kernels for all devices take hours.
    return "cuda" if shutil.which("nvcc") and has_nvidia_device() else "cpu"


def known_backend(named: str) -> str:
    if named in BACKENDS:
        return named
    near = difflib.get_close_matches(named.lower(), BACKENDS, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise Failure(f"KVASIR_BACKEND='{named}' is unknown; say one of {', '.join(BACKENDS)}.{hint}")


def has_nvidia_device() -> bool:
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        return True
    return "GPU" in output_of("nvidia-smi", "-L")


def backend_args(backend: str, tools: Tools) -> tuple[str, ...]:
    """CMake arguments a backend needs; the user's come after them and win."""
    if backend == "cuda":
        return ("-DGGML_CUDA=ON", *cuda_architectures())
    if backend == "vulkan":
        return ("-DGGML_VULKAN=ON",)
    if backend == "metal":
        return ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON")
    off = ("-DGGML_METAL=OFF",) if sys.platform == "darwin" else ()
    return (*off, *openblas_args(tools))


def cuda_architectures() -> tuple[str, ...]:
    """This machine's devices only: kernels for all architectures take ten times as long."""
    if not has_nvidia_device():
        return ("-DGGML_NATIVE=OFF",)  # llama.cpp's own list of architectures
    capabilities = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    found = sorted({cap.replace(".", "") for cap in capabilities if re.fullmatch(r"\d+\.\d", cap)})
    return (f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(found) or 'native'}",)


def openblas_args(tools: Tools) -> tuple[str, ...]:
    """OpenBLAS where it is installed with its headers. macOS needs nothing: ggml takes Accelerate by itself."""
    if (
        sys.platform != "linux"
        or shutil.which("pkg-config") is None
        or not output_of("pkg-config", "--modversion", "openblas")
    ):
        return ()
    flags = output_of("pkg-config", "--cflags", "--libs", "openblas").split()
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "blas.c"
        program.write_text("#include <cblas.h>\nint main(void) { return cblas_isamax(0, 0, 1) > 1; }\n")
        linked = subprocess.run([tools.cc, program, "-o", program.with_suffix(""), *flags], capture_output=True)
    return ("-DGGML_BLAS=ON", "-DGGML_BLAS_VENDOR=OpenBLAS") if linked.returncode == 0 else ()


def recipe(source: Source, tools: Tools, environ: Mapping[str, str] = os.environ) -> Recipe:
    """What would be built now."""
    backend = choose_backend(environ)
    compilers = [compiler_identity(tools.cc), compiler_identity(tools.cxx)]
    if backend == "cuda":
        compilers.append(output_of("nvcc", "--version"))
    return Recipe(
        source=source.identity,
        backend=backend,
        args=(*backend_args(backend, tools), *user_args(environ)),
        compilers=tuple(compilers),
        wrapper="".join(
            path.read_text(encoding="utf-8") for path in sorted(WRAPPER.iterdir()) if path.name != "pin.toml"
        ),
        cpu=cpu_features(),
    )


def user_args(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(environ.get("KVASIR_CMAKE_ARGS", "")))
    except ValueError as error:
        raise Failure(f"KVASIR_CMAKE_ARGS cannot be read as shell words: {error}") from error


def compiler_identity(compiler: str) -> str:
    """Version and target; not the name, for c++ and g++ are one compiler."""
    version = output_of(compiler, "--version").partition("\n")[0].partition(" ")[2]
    target = output_of(compiler, "-dumpmachine").strip()
    if not version:
        raise Failure(f"the compiler '{compiler}' does not run; {how_to_install_compiler()}")
    return f"{version} {target}"


def cpu_features() -> str:
    """What -march=native sees, near enough: two machines with the same text can share libraries."""
    if sys.platform == "darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string", "hw.optional").strip()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    lines = dict.fromkeys(re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", text, flags=re.MULTILINE))
    return "\n".join([platform.machine(), *lines])


def output_of(*command: str) -> str:
    """What a small program prints; empty where it fails or is not there."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def libraries(source: Source, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder with the libraries and kvasir-llama.cmake; built first where it is not complete."""
    return built(source, "kvasir-libs", environ)


def peers(source: Source, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder with the programs `make bench` compares against, linked with the very same archives."""
    folder = built(source, "kvasir-peers", environ) / "bin"
    missing = [name for name in PEERS if not (folder / name).is_file()]
    if missing:
        raise Failure(f"{folder} lacks {', '.join(missing)}; remove {folder.parent} and run it again")
    return folder


def built(source: Source, target: str, environ: Mapping[str, str]) -> Path:
    """Build `target` under the recipe's folder unless its mark is there."""
    tools = find_tools(environ)
    made = recipe(source, tools, environ)
    folder = build_home(environ) / "libs" / made.key
    mark = folder / ("complete" if target == "kvasir-libs" else "complete-peers")
    if mark.is_file():
        return folder
    with disk_faults(folder), locked(folder):
        if not mark.is_file():
            folder.mkdir(exist_ok=True)
            say(f"building {target} ({made.backend}) once, into {folder}; several minutes on a small machine")
            configure(
                folder, source, made, tools, peers=target == "kvasir-peers" or (folder / "complete-peers").is_file()
            )
            jobs = environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(n_jobs())
            run_in_sight(
                [tools.cmake, "--build", folder, "--target", target, "--parallel", jobs],
                what=f"building {target}",
                folder=folder,
            )
            write_mark(mark, made)
    return folder


def configure(folder: Path, source: Source, made: Recipe, tools: Tools, *, peers: bool) -> None:
    """Run CMake in `folder`; unfinished work of another CMake or generator is thrown away once."""
    command: list[str | Path] = [
        tools.cmake,
        "-S",
        WRAPPER,
        "-B",
        folder,
        *cmake_arguments(source, made, tools, peers=peers),
    ]
    begun = (folder / "CMakeCache.txt").is_file() and not (folder / "complete").is_file()
    if begun:
        try:
            return run_in_sight(command, what="configuring llama.cpp", folder=folder)
        except Failure:
            say("starting over in that folder")
            shutil.rmtree(folder)
            folder.mkdir()
    return run_in_sight(command, what="configuring llama.cpp", folder=folder)


def cmake_arguments(source: Source, made: Recipe, tools: Tools, *, peers: bool) -> list[str]:
    """Ours first: a later -D of the same name wins, so the user's word is the last."""
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"] if tools.ninja else ["-G", "Unix Makefiles"]
    return [
        *generator,
        f"-DCMAKE_C_COMPILER={tools.cc}",
        f"-DCMAKE_CXX_COMPILER={tools.cxx}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DKVASIR_LLAMA_CPP_DIR={source.folder}",
        f"-DKVASIR_BACKEND={made.backend}",
        f"-DLLAMA_BUILD_COMMIT={source.commit}",
        f"-DKVASIR_PEERS={'ON' if peers else 'OFF'}",
        *made.args,
    ]


def n_jobs() -> int:
    """All cores this process may use, unless the memory is too small for as many compilers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // JOB_BYTES))


def write_mark(mark: Path, made: Recipe) -> None:
    """Written last and in one move: a folder with it is whole. Holds the recipe, for people who wonder."""
    temporary = mark.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(made), indent=1), encoding="utf-8")
    temporary.replace(mark)


def python_packages(args: Sequence[str] = ()) -> list[str]:
    """Which build programs have to come from PyPI here: cmake if there is none or it is too old, ninja if none."""
    wanted = (3, 26) if sys.version_info >= (3, 12) else (3, 18)  # 3.26: stable ABI modules
    found = re.search(r"version (\d+)\.(\d+)", output_of("cmake", "--version"))
    cmake_is_fine = found is not None and (int(found[1]), int(found[2])) >= wanted
    return [*([] if cmake_is_fine else ["cmake"]), *([] if shutil.which("ninja") else ["ninja"]), *args]
