"""`kvasir doctor`: what works here, and what to do about what does not.

Owns a list of checks, each a small function that returns findings or raises; one failing check never hides the
others. Changes nothing and downloads nothing.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import kvasir
from kvasir import config
from kvasir.cli import console
from kvasir.cli.options import JsonFlag
from kvasir.engine.settings import default_threads
from kvasir.errors import KvasirError
from kvasir.model.layouts import slow_layout_hint
from kvasir.model.store import name_of, resolve

PROMPT = "Once upon a time"
N_TOKENS = 16
# The default model is 98 MB and is unpacked beside its download.
STORE_NEEDS_BYTES = 300 << 20


class Finding(NamedTuple):
    """One line of the report. `advice` says what to do where `ok` is False, or what would make it better."""

    check: str
    ok: bool
    detail: str
    advice: str = ""


Check = Callable[[str | None], Iterator[Finding]]


def doctor(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="REF", help="The model to try. Default: smollm2.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this installation: versions, backend, devices, memory, settings, store, and a tiny generation.

    Exit code 1 where something does not work; each such line says what to do.

    \b
    Examples:
      kvasir doctor
      kvasir doctor --json | jq '.findings[] | select(.ok | not)'
    """
    findings = [finding for name, check in CHECKS.items() for finding in _guarded(name, check, model)]
    healthy = all(finding.ok for finding in findings)
    if as_json:
        console.write_json({"ok": healthy, "findings": [finding._asdict() for finding in findings]})
    else:
        _print(findings)
    if not healthy:
        raise typer.Exit(1)


def _guarded(name: str, check: Check, model: str | None) -> Iterator[Finding]:
    try:
        yield from check(model)
    except KvasirError as error:
        yield Finding(name, False, str(error), ADVICE.get(name, ""))
    except ImportError as error:
        yield Finding(name, False, f"cannot be imported: {error}", "Build it: `make build`, or `pip install .`.")
    except Exception as error:  # a report that breaks off at the first surprise would be no report
        yield Finding(name, False, f"{type(error).__name__}: {error}", ADVICE.get(name, ""))


def _versions(_: str | None) -> Iterator[Finding]:
    native = import_module("kvasir.native")
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("versions", True, f"kvasir {kvasir.__version__}, llama.cpp {native.llama_version()}, {python}")


def _backend(_: str | None) -> Iterator[Finding]:
    native = import_module("kvasir.native")
    build = native.build_info()
    yield Finding("backend", True, f"{build.get('backend', 'unknown')}, built with {build.get('compiler', 'unknown')}")
    yield Finding("instructions", True, _instructions(build.get("system_info", "")))


def _instructions(system_info: str) -> str:
    """The names that llama.cpp's "CPU : AVX = 1 | AVX2 = 1 | " switches on."""
    return ", ".join(re.findall(r"(\w+) = 1", system_info)) or "none named"


def _devices(_: str | None) -> Iterator[Finding]:
    native = import_module("kvasir.native")
    for device in native.devices():
        memory = f", {_size(device.memory_free)} free of {_size(device.memory_total)}" if device.memory_total else ""
        yield Finding("device", True, f"{device.name} ({device.kind}): {device.description.strip()}{memory}")
    has_gpu = any(device.kind in ("gpu", "igpu") for device in native.devices())
    if not has_gpu and shutil.which("nvidia-smi"):
        advice = "Install the CUDA toolkit and build again with KVASIR_BACKEND=cuda."
        yield Finding("device", False, "this machine has an NVIDIA GPU that this build cannot use", advice)


def _memory(_: str | None) -> Iterator[Finding]:
    import psutil  # only here is it needed

    memory = psutil.virtual_memory()
    enough = memory.available > (1 << 30)
    advice = "" if enough else "Close other programs: even a small model wants about 1 GB."
    yield Finding("memory", enough, f"{_size(memory.available)} available of {_size(memory.total)}", advice)


def _threads(_: str | None) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = config.load_settings().threads
    chosen = f"{default_threads()} used" if wanted is None else f"{wanted} set"
    fine = wanted is None or wanted <= usable
    advice = "" if fine else f"Set threads to at most {usable}: threads without a core of their own only slow it down."
    yield Finding("threads", fine, f"{usable} CPUs usable; {chosen}", advice)


def _settings(_: str | None) -> Iterator[Finding]:
    config.sampling_defaults()
    found = config.find_toml(os.environ)
    yield Finding("settings", True, str(found.absolute()) if found else f"no {config.TOML_NAME}; defaults")


def _store(_: str | None) -> Iterator[Finding]:
    settings = config.store_settings()
    there = next(folder for folder in (settings.home, *settings.home.parents) if folder.exists())
    advice = "Set KVASIR_HOME to a folder you can write to."
    if not os.access(there, os.W_OK) or not there.is_dir():
        yield Finding("store", False, f"{settings.home} cannot be written", advice)
        return
    free = shutil.disk_usage(there).free
    offline = "; KVASIR_OFFLINE is set, so nothing is fetched" if settings.offline else ""
    roomy = free > STORE_NEEDS_BYTES
    yield Finding("store", roomy, f"{settings.home}, {_size(free)} free{offline}", "" if roomy else advice)


def _generation(ref: str | None) -> Iterator[Finding]:
    path = _local_path(ref)
    with kvasir.load(path, cache=False) as model:
        yield Finding("model", True, f"{model.info.description}, {model.info.path}")
        yield _layout(model.info)
        completion = model.generate(PROMPT, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
    rate = (len(completion.tokens) - 1) / completion.timings.decode_s if completion.timings.decode_s else 0.0
    yield Finding(
        "generation", bool(completion.text.strip()), f"{PROMPT!r} -> {completion.text!r}, {rate:.0f} tokens/s"
    )


def _layout(info: kvasir.ModelInfo) -> Finding:
    build = import_module("kvasir.native").build_info()
    hint = slow_layout_hint(info.file_type, build, ref=name_of(info.path))
    speed = "slow on this CPU" if hint else "not known to be slow here"
    return Finding("layout", True, f"{info.file_type}, {speed}", hint or "")


def _local_path(ref: str | None) -> Path:
    """The model's file, if it is here already: a check of what is here must not fetch what is not."""
    store = config.store_settings()
    offline = config.StoreSettings(home=store.home, offline=True)
    return resolve(ref, offline, model_dir=config.load_settings().model_dir, convert=False)


CHECKS: dict[str, Check] = {
    "versions": _versions,
    "backend": _backend,
    "device": _devices,
    "memory": _memory,
    "threads": _threads,
    "settings": _settings,
    "store": _store,
    "generation": _generation,
}

ADVICE = {
    "generation": "Fetch the model with `kvasir pull`, or name another with `kvasir doctor -m REF`.",
    "settings": "Correct the setting named above.",
    "threads": "Correct the setting named above.",
    "store": "Correct the setting named above.",
}


def _print(findings: list[Finding]) -> None:
    marks = {True: "ok  ", False: "FAIL"}
    if sys.stdout.isatty():
        marks = {True: "\033[32mok\033[0m  ", False: "\033[31mFAIL\033[0m"}
    for finding in findings:
        console.write(f"{marks[finding.ok]}  {finding.check:<12}  {finding.detail}\n")
        if finding.advice:
            console.write(f"{'':<20}-> {finding.advice}\n")
    n_failed = sum(not finding.ok for finding in findings)
    console.write("Everything works.\n" if not n_failed else f"{n_failed} of {len(findings)} checks failed.\n")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MB"
