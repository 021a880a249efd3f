"""What every comparison shares: the peers, the machine, the order of sides, and how results are shown and kept.

Owns the rules that make a figure worth committing: sides alternate within one run, each figure is a median, the
machine is described and must be quiet, and a result names what it ran on. Measures nothing itself, and never writes
a path of this machine into a result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table

from kvasir import native
from kvasir.engine.settings import default_threads
from kvasir.model.store import resolve

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# One busy process beside ggml's spinning threads takes most of their speed, so half a process is already too much.
QUIET_LOAD = 0.5
# The load average of a minute ago still holds our own last script; 2.0 falls below 0.5 in about 85 seconds.
SETTLE_S = 180.0


class Unable(Exception):
    """The comparison cannot run; the text is the one line the user reads."""


# Options and the model


def options(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2", help="a path or a reference")
    parser.add_argument("-t", "--threads", type=int, default=default_threads(), help="threads of either side")
    parser.add_argument("-r", "--rounds", type=int, default=rounds, help="how often each side is measured")
    parser.add_argument("--quick", action="store_true", help="one small round, to see that it runs; keeps no result")
    parser.add_argument("--busy-ok", action="store_true", help="measure even though other work runs here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for results")
    return parser


def model_path(ref: str) -> Path:
    """The file of a model, fetched if need be."""
    return resolve(ref)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a script's main; what stops it is one line on standard error."""
    try:
        sys.exit(main())
    except Unable as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(1)


# The machine


@dataclass(frozen=True, slots=True)
class Machine:
    """What a figure was measured on."""

    cpu: str
    cores: int
    system: str
    threads: int
    load_before: float
    llama_cpp: str
    backend: str

    @property
    def busy(self) -> bool:
        return self.load_before > QUIET_LOAD

    def lines(self) -> list[str]:
        state = f"load before the run {self.load_before:.2f}"
        if self.busy:
            state += ": **the machine was busy; these figures mean nothing**"
        return [
            f"{self.cpu}, {self.cores} cores, {self.threads} threads in use, {self.system}; {state}",
            f"llama.cpp {self.llama_cpp}, {self.backend}; peers from the same source and archives",
        ]


def quiet_machine(*, threads: int, accept_busy: bool) -> Machine:
    """Describe the machine; wait for it to be quiet, and refuse if it does not become so."""
    until = time.monotonic() + SETTLE_S
    while not accept_busy and os.getloadavg()[0] > QUIET_LOAD:
        if time.monotonic() > until:
            raise Unable(
                f"the load average is {os.getloadavg()[0]:.2f} and stays above {QUIET_LOAD}: other work runs here. "
                "Stop it, or say --busy-ok."
            )
        say(f"waiting for the load to fall below {QUIET_LOAD}; now {os.getloadavg()[0]:.2f}")
        time.sleep(10)
    machine = describe(threads)
    if machine.busy:
        say(f"the load average is {machine.load_before:.2f}: the figures will mean nothing")
    return machine


def describe(threads: int) -> Machine:
    build = native.build_info()
    return Machine(
        cpu=cpu_name(),
        cores=psutil.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        threads=threads,
        load_before=round(os.getloadavg()[0], 2),
        llama_cpp=build["llama_cpp"],
        backend=build["backend"],
    )


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    if found := re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE):
        return found[1]
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout  # ARM names parts by number
    found = re.search(r"^Model name:\s*(.+)$", lscpu, flags=re.MULTILINE)
    return found[1] if found else platform.machine()


# Peers


def peer(name: str) -> Path:
    """One of llama.cpp's programs, built first where it is missing."""
    folder = os.environ.get("KVASIR_PEERS_DIR") or _build_peers()
    program = Path(folder) / name
    if not program.is_file():
        raise Unable(f"there is no {name} in {folder}; run 'make bench', which builds it")
    return program


def _build_peers() -> str:
    command = [sys.executable, str(ROOT / "tools" / "llama_cpp.py"), "peers"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Unable("the peers could not be built; the reason is above this line")
    os.environ["KVASIR_PEERS_DIR"] = done.stdout.strip()
    return done.stdout.strip()


def run_peer(name: str, *arguments: object) -> str:
    """Run a peer to its end and return what it prints."""
    command = [str(peer(name)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Unable(f"{name} ended with {done.returncode}: {last}")
    return done.stdout


def llama_bench(*arguments: object) -> list[dict[str, Any]]:
    """The tests that one llama-bench run made; `avg_ts` holds tokens per second."""
    tests: list[dict[str, Any]] = json.loads(run_peer("llama-bench", "-o", "json", *arguments))
    return tests


def batched_bench(*arguments: object) -> list[dict[str, Any]]:
    """The rows that one llama-batched-bench run made; `t` holds its seconds."""
    lines = run_peer("llama-batched-bench", "--output-format", "jsonl", *arguments).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    if not rows:
        raise Unable("llama-batched-bench printed no row; is the context large enough?")
    return rows


# Rounds and figures

Figures = Mapping[str, float]


def alternate(sides: Mapping[str, Callable[[int], Figures]], *, rounds: int) -> dict[str, list[Figures]]:
    """Measure every side once a round, each round beginning with another side; the round's number picks the prompts."""
    names = list(sides)
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            say(f"round {number + 1} of {rounds}: {name}")
            found[name].append(sides[name](number))
    return found


def medians(rounds: Sequence[Figures]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def ratio(ones: Sequence[Figures], others: Sequence[Figures], name: str) -> float:
    """One side's figure over the other's, the median of the rounds: what slowed a whole round cancels out."""
    return statistics.median(one[name] / other[name] for one, other in zip(ones, others, strict=True))


def percentile(values: Iterable[float], part: float) -> float:
    """The smallest value that `part` of all values do not exceed; 0 of no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


# Prompts


class Prompts:
    """Prompts of exact length from plain words, different for every seed.

    Words and not random ids, so that the text that follows is text too: bytes of half a character are held back until
    the rest comes, and would look like gaps.
    """

    TEXT = (
        "river mountain letter garden window winter summer bridge story market teacher engine island forest "
        "village picture kitchen morning evening question answer sister brother doctor captain silver golden quiet "
        "heavy little ancient modern walked looked found carried opened closed remembered promised under over after "
        "before between around and but while because the a one another every"
    )

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        self._ids = [tokenize(" " + word) for word in self.TEXT.split()]

    def of(self, n_tokens: int, *, seed: object, first: int | None = None) -> list[int]:
        """A prompt of `n_tokens`, the same for the same seed. Those with another `first` differ from the first word."""
        draw = random.Random(repr(seed))
        tokens = [] if first is None else list(self._ids[first])
        while len(tokens) < n_tokens:
            tokens += draw.choice(self._ids)
        return tokens[:n_tokens]


# Results


@dataclass(slots=True)
class Verdict:
    """A ratio against its target; `least` None only reports."""

    what: str
    ratio: float
    least: float | None = None

    @property
    def met(self) -> bool:
        return self.least is None or self.ratio >= self.least

    def __str__(self) -> str:
        if self.least is None:
            return f"{self.what}: {self.ratio:.3f}"
        return f"{self.what}: {self.ratio:.3f}, target {self.least}: {'met' if self.met else 'missed'}"


@dataclass(slots=True)
class Section:
    """One table: a row per side, a column per figure."""

    title: str
    rows: dict[str, dict[str, float]]
    verdicts: list[Verdict] = field(default_factory=list)
    rounds: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def cells(self) -> list[list[str]]:
        return [[side, *(shown(row.get(name)) for name in self.columns)] for side, row in self.rows.items()]


@dataclass(slots=True)
class Report:
    """All that one script found."""

    name: str
    title: str
    machine: Machine
    model: str
    settings: dict[str, Any]
    sections: list[Section] = field(default_factory=list)

    @property
    def met(self) -> bool:
        return all(verdict.met for section in self.sections for verdict in section.verdicts)

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self._facts()), ""]
        for section in self.sections:
            lines += [f"## {section.title}", "", *_table(section), ""]
            lines += [f"- {verdict}" for verdict in section.verdicts] + ([""] if section.verdicts else [])
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return [f"{self.model}; {settings}", *self.machine.lines()]

    def show(self) -> None:
        """A table on a terminal, the markdown of the result in a pipe."""
        console = Console()
        if not console.is_terminal:
            print(self.markdown())
            return
        console.print(f"[bold]{self.title}[/bold]")
        console.print("\n".join(self._facts()), style="dim")
        for section in self.sections:
            table = Table(title=section.title, title_justify="left")
            table.add_column("")
            for name in section.columns:
                table.add_column(name, justify="right")
            for cells in section.cells():
                table.add_row(*cells)
            console.print(table)
            for verdict in section.verdicts:
                console.print(str(verdict), style="green" if verdict.met else "red")

    def write(self, folder: Path) -> None:
        """Keep the result: markdown to read, JSON with every round to compute with."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown(), encoding="utf-8")
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        say(f"written: {self.name}.md and {self.name}.json in {folder}")


def finish(report: Report, arguments: argparse.Namespace) -> int:
    """Show and keep a report; the exit code is 1 only for a missed target under --check."""
    report.show()
    if not arguments.quick:
        report.write(arguments.out)
    return int(arguments.check and not report.met)


def _table(section: Section) -> list[str]:
    return [
        "| | " + " | ".join(section.columns) + " |",
        "|---|" + "---:|" * len(section.columns),
        *("| " + " | ".join(cells) + " |" for cells in section.cells()),
    ]


def shown(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def say(text: str) -> None:
    """Progress, for people; results alone go to standard output."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
