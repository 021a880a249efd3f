"""Fetch and build the pinned llama.cpp: `python tools/llama_cpp.py source|libs|peers|key|packages|bump VERSION`.

Prints the answer (a folder, a key) on standard output and progress on standard error; a fault is one line and exit
code 1. Called by the Makefile and, at configure time, by the top CMakeLists.txt. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the siblings, also when this file is imported by a test

import llama_libs
import llama_source
from steps import Failure, say

ANSWERS: dict[str, tuple[str, Callable[[], object]]] = {
    "source": ("fetch and unpack the source", lambda: current_source().folder),
    "libs": ("build the static libraries", lambda: llama_libs.libraries(current_source())),
    "peers": ("build the programs of 'make bench'", lambda: llama_libs.peers(current_source())),
    "key": ("name the libraries' folder, build nothing", lambda: current_key()),
    "packages": ("name the build programs to take from PyPI", lambda: " ".join(llama_libs.python_packages())),
}


def current_source() -> llama_source.Source:
    return llama_source.source(llama_source.read_pin())


def current_key() -> str:
    return llama_libs.recipe(current_source(), llama_libs.find_tools()).key


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch and build the pinned llama.cpp.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, _) in ANSWERS.items():
        commands.add_parser(name, help=text)
    commands.add_parser("bump", help="move the pin to another version").add_argument("version")
    chosen = parser.parse_args(arguments)
    try:
        print(
            llama_source.bump(chosen.version).requirement if chosen.command == "bump" else ANSWERS[chosen.command][1]()
        )
    except Failure as failure:
        say(f"error: {failure}")
        return 1
    except KeyboardInterrupt:
        say("stopped; the next build goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
