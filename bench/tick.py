"""Where a tick's time goes: Python's share, sampling in parallel against serial, threads that sleep against spin."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
from harness import Figures, Report, Section, Verdict

import kvasir
from kvasir import native

MOST_PYTHON = 0.05
N_CELLS = 256  # of each slot
SLOTS = (1, 8, 32)


def main() -> int:
    """Measure, report, keep."""
    parser = harness.options("Where a tick's time goes.", rounds=5)
    arguments = parser.parse_args()
    arguments.ticks = 8 if arguments.quick else 60
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    path = harness.model_path(arguments.model)
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    settings = {"ticks": arguments.ticks, "rounds": arguments.rounds}
    report = Report("tick", "Where a tick's time goes", machine, path.name, settings)
    report.sections = [shares(path, arguments), *(sampling(path, slots, arguments) for slots in SLOTS)]
    report.sections += [polling(path, slots, arguments) for slots in (1, 8)]
    return harness.finish(report, arguments)


def shares(path: Path, arguments: argparse.Namespace) -> Section:
    """Python's share with every slot busy, through the Python API."""
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Callable[[int], Figures]] = {
            f"{path.name}, 8 slots": lambda _: {"share": python_share(path, 8, arguments)},
            "tiny random model, 32 slots": lambda _: {"share": python_share(tiny_model(folder), 32, arguments)},
        }
        found = harness.alternate(sides, rounds=arguments.rounds)
    rows = {name: harness.medians(rounds) for name, rounds in found.items()}
    first = next(iter(rows.values()))["share"]
    verdict = Verdict("room below 5 % of a tick (1 - share / 0.05)", 1 - first / MOST_PYTHON, 0.0)
    return Section("Plan and apply, part of a tick", rows, [verdict], found)


def sampling(path: Path, slots: int, arguments: argparse.Namespace) -> Section:
    """One tick with default sampling in every slot, its rows sampled by one thread or by all."""
    sides: dict[str, Callable[[int], Figures]] = {
        "parallel": lambda _: tick_ms(path, slots, arguments, sample_threads=arguments.threads),
        "serial": lambda _: tick_ms(path, slots, arguments, sample_threads=1),
    }
    return _section(f"Sampling {slots} rows, ms", sides, arguments, "serial sampling / parallel", "sampling")


def polling(path: Path, slots: int, arguments: argparse.Namespace) -> Section:
    """One tick with threads that sleep between two graphs, and with threads that spin."""
    sides: dict[str, Callable[[int], Figures]] = {
        "sleep": lambda _: tick_ms(path, slots, arguments, poll=0),
        "spin a little, as the engine does": lambda _: tick_ms(path, slots, arguments, poll=1),
        "spin, llama.cpp's default": lambda _: tick_ms(path, slots, arguments, poll=50),
    }
    return _section(
        f"Threads between ticks, {slots} rows, ms", sides, arguments, "spinning tick / sleeping tick", "tick"
    )


def _section(
    title: str, sides: dict[str, Callable[[int], Figures]], arguments: argparse.Namespace, what: str, figure: str
) -> Section:
    found = harness.alternate(sides, rounds=arguments.rounds)
    rows = {name: harness.medians(rounds) for name, rounds in found.items()}
    first, *_, last = rows.values()
    return Section(title, rows, [Verdict(what, last[figure] / first[figure])], found)


def python_share(path: Path, slots: int, arguments: argparse.Namespace) -> float:
    with (
        kvasir.load(path, slots=slots, threads=arguments.threads, context_size=slots * N_CELLS, cache=False) as model,
        ThreadPoolExecutor(slots) as pool,
    ):
        list(
            pool.map(
                lambda i: model.generate(f"{i} is a number", max_tokens=arguments.ticks, ignore_eos=True), range(slots)
            )
        )
        return model.stats().python_share


def tick_ms(
    path: Path, slots: int, arguments: argparse.Namespace, *, sample_threads: int = 0, poll: int = 1
) -> Figures:
    """The medians of one decode and of its sampling."""
    model = native.Model.load(str(path))
    context = native.Context(
        model,
        n_ctx=slots * N_CELLS,
        n_seq_max=slots,
        threads=arguments.threads,
        sample_threads=sample_threads,
        poll=poll,
    )
    samplers = [native.Sampler(model.vocab, native.SamplerParams()) for _ in range(slots)]
    tokens: list[int | None] = [100 + slot for slot in range(slots)]
    ticks, samples = [], []
    for position in range(arguments.ticks):
        rows = [native.Row(slot, position, [tokens[slot] or 0], samplers[slot]) for slot in range(slots)]
        started = time.perf_counter()
        step = context.step(rows)
        ticks.append(1000 * (time.perf_counter() - started))
        samples.append(1000 * step.sample_s)
        tokens = step.tokens
    context.close()
    return {"tick": statistics.median(ticks), "sampling": statistics.median(samples)}


def tiny_model(folder: str) -> Path:
    """The tests' tiny llama, written once."""
    path = Path(folder) / "tiny.gguf"
    if not path.exists():
        sys.path.insert(0, str(harness.ROOT))
        from tests.models import write_model

        write_model("llama", path)
    return path


if __name__ == "__main__":
    harness.run(main)
