"""Many streams at once, through the Python API, against llama-server and llama-batched-bench.

Three cases: `unshared` (8 prompts with nothing in common), `shared` (8 prompts with a long common beginning) and `gap`
(a long prompt arrives among 7 running streams). Prompts are token ids, the same on every side and new in every round,
so that nothing is left over from the round before. Each measurement opens its side anew and warms it up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import llama_server
from harness import Figures, Prompts, Report, Section, Verdict
from llama_server import Trace

import kvasir

SLOTS = 8
# Which word a prompt begins with: 0 to 7 are the own parts, so nothing is shared but what a case means to share.
COMMON, LATE, WARM_UP = SLOTS, SLOTS + 1, SLOTS + 2
LAYOUTS = {"split": False, "unified": True}


@dataclass(frozen=True, slots=True)
class Case:
    """The work of one case: `n_prompts` prompts of `n_common` + `n_own` tokens, `n_out` tokens each."""

    name: str
    n_prompts: int
    n_common: int
    n_own: int
    n_out: int
    n_late: int = 0  # tokens of a prompt that arrives while the others run
    late_after: int = 16  # how far they are then, and how long its own reply is

    def prompts(self, words: Prompts, number: int) -> list[list[int]]:
        common = words.of(self.n_common, seed=(self.name, number), first=COMMON) if self.n_common else []
        return [common + words.of(self.n_own, seed=(self.name, number, i), first=i) for i in range(self.n_prompts)]

    def late(self, words: Prompts, number: int) -> list[int] | None:
        return words.of(self.n_late, seed=(self.name, number, "late"), first=LATE) if self.n_late else None


CASES = (
    Case("unshared", SLOTS, 0, 256, 64),
    Case("shared", SLOTS, 1024, 256, 64),
    Case("gap", SLOTS - 1, 0, 64, 1024, n_late=2000),
)
QUICK_CASES = (
    Case("unshared", SLOTS, 0, 32, 16),
    Case("shared", SLOTS, 128, 32, 16),
    Case("gap", SLOTS - 1, 0, 16, 256, n_late=256),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same on all sides."""

    path: Path
    threads: int
    context: int
    batch: int
    ubatch: int


def main() -> int:
    """Measure the chosen cases, report, keep."""
    arguments = parse()
    path = harness.model_path(arguments.model)
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    setup = Setup(path, arguments.threads, arguments.context, arguments.batch, arguments.ubatch)
    settings = {"slots": SLOTS, "context": setup.context, "batch": setup.batch, "ubatch": setup.ubatch}
    settings |= {"kvasir layout": arguments.layout, "rounds": arguments.rounds}
    report = Report("batching", "Many streams at once", machine, path.name, settings)
    with kvasir.load(path, vocab_only=True) as model:
        words = Prompts(lambda text: model.tokenize(text, add_special=False))
    for case in QUICK_CASES if arguments.quick else CASES:
        if case.name in arguments.cases:
            harness.say(f"case {case.name}")
            found = harness.alternate(sides_of(case, setup, words, arguments.layout), rounds=arguments.rounds)
            report.sections.append(section_of(case, found))
    return harness.finish(report, arguments)


def parse() -> argparse.Namespace:
    parser = harness.options("Many streams at once against llama-server and llama-batched-bench.", rounds=3)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="which cases")
    parser.add_argument(
        "--layout",
        choices=["auto", *LAYOUTS],
        default="split",
        help="Kvasir's KV layout; nothing shared, the peers' better one is split too",
    )
    # 2,560 a slot: the late prompt and its reply fit a slot of its own in the split layout.
    parser.add_argument("-c", "--context", type=int, default=SLOTS * 2560, help="cells of all slots together")
    parser.set_defaults(model="smollm2@q8_0")
    # llama-server's own defaults.
    parser.add_argument("-b", "--batch", type=int, default=2048, help="logical batch of all sides")
    parser.add_argument("-ub", "--ubatch", type=int, default=512, help="physical batch of all sides")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.context = 1, SLOTS * 512
    return arguments


def sides_of(case: Case, setup: Setup, words: Prompts, layout: str) -> dict[str, Callable[[int], Figures]]:
    sides: dict[str, Callable[[int], Figures]] = {"kvasir": lambda number: ours(case, setup, words, layout, number)}
    for name, unified in LAYOUTS.items():
        sides[f"llama-server, {name}"] = lambda number, u=unified: theirs(case, setup, words, u, number)  # type: ignore[misc]
    if case.name == "unshared":
        for name, unified in LAYOUTS.items():
            sides[f"llama-batched-bench, {name}"] = lambda _, u=unified: bare(case, setup, u)  # type: ignore[misc]
    return sides


# Kvasir


def ours(case: Case, setup: Setup, words: Prompts, layout: str, number: int) -> Figures:
    with opened(setup, layout) as model:
        model.generate(words.of(32, seed="warm up", first=WARM_UP), max_tokens=8, temperature=0, ignore_eos=True)
        assert model._engine is not None
        before = model._engine.stats().counters
        traces = asyncio.run(read_all(model, case, words, number))
        stats = model._engine.stats()
    after = stats.counters
    n_prefilled = after.prefill_rows - before.prefill_rows
    if not case.n_late:  # what is common is computed once: 3,072 rows in the shared case
        assert n_prefilled == (wanted := case.n_common + case.n_prompts * case.n_own), f"{n_prefilled}, not {wanted}"
    python_s = after.plan_s + after.apply_s - before.plan_s - before.apply_s
    return {
        **figures_of(case, traces),
        "rows prefilled": n_prefilled,
        "python % of a tick": 100 * python_s / (python_s + after.native_s - before.native_s),
    }


@contextlib.contextmanager
def opened(setup: Setup, layout: str) -> Iterator[kvasir.Model]:
    with kvasir.load(
        setup.path,
        slots=SLOTS,
        threads=setup.threads,
        context_size=setup.context,
        batch=setup.batch,
        ubatch=setup.ubatch,
        layout=layout,
        cache=False,  # what one run leaves on disk must not serve the next; sharing between slots is the engine's own
    ) as model:
        yield model


async def read_all(model: kvasir.Model, case: Case, words: Prompts, number: int) -> list[Trace]:
    """Every prompt as a task of one event loop; the late one comes when the others run, and ends them."""
    running: list[Trace] = []

    def start(prompt: list[int], n_tokens: int) -> asyncio.Task[None]:
        running.append(Trace(time.perf_counter()))
        return asyncio.create_task(read(model, prompt, n_tokens, running[-1]))

    tasks = [start(prompt, case.n_out) for prompt in case.prompts(words, number)]
    if (late := case.late(words, number)) is None:
        await asyncio.gather(*tasks)
        return running
    while not all(len(trace.times) >= case.late_after for trace in running):
        await asyncio.sleep(0.01)
    await start(late, case.late_after)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return running


async def read(model: kvasir.Model, prompt: list[int], n_tokens: int, trace: Trace) -> None:
    stream = model.stream(prompt, max_tokens=n_tokens, temperature=0, ignore_eos=True)
    async for _ in stream:
        trace.times.append(time.perf_counter())
    trace.n_tokens = len((await stream).tokens)


# Peers


def theirs(case: Case, setup: Setup, words: Prompts, unified: bool, number: int) -> Figures:
    with llama_server.serving(
        setup.path,
        threads=setup.threads,
        context=setup.context,
        batch=setup.batch,
        ubatch=setup.ubatch,
        slots=SLOTS,
        unified=unified,
    ) as port:
        llama_server.stream_all(port, [words.of(32, seed="warm up", first=WARM_UP)], n_tokens=8)
        traces = llama_server.stream_all(
            port,
            case.prompts(words, number),
            n_tokens=case.n_out,
            late=case.late(words, number),
            late_after=case.late_after,
        )
    return figures_of(case, traces)


def bare(case: Case, setup: Setup, unified: bool) -> Figures:
    """The same rows with no prompts, samplers or readers: the floor of anything built on llama.cpp."""
    # Its last row is often lost: the program ends without flushing its log. So a small second one follows.
    rows = harness.batched_bench(
        *("-m", setup.path, "-t", setup.threads, "-tb", setup.threads, "-c", setup.context),
        *("-b", setup.batch, "-ub", setup.ubatch, "--kv-unified" if unified else "--no-kv-unified"),
        *("-npp", case.n_common + case.n_own, "-ntg", case.n_out, "-npl", f"{case.n_prompts},1"),
    )
    return {"wall s": rows[0]["t"]}


# Figures


def figures_of(case: Case, traces: list[Trace]) -> Figures:
    if case.n_late:
        return gap_figures(traces[:-1], traces[-1])
    for trace in traces:
        assert trace.n_tokens == case.n_out, f"wanted {case.n_out} tokens, got {trace.n_tokens}"
    begun = min(trace.started for trace in traces)
    gaps = [end - start for trace in traces for start, end in trace.gaps]
    return {
        "wall s": max(trace.times[-1] for trace in traces) - begun,
        "first token p50 s": harness.percentile((trace.first_s for trace in traces), 0.5),
        "gap p99 s": harness.percentile(gaps, 0.99),
        "longest gap s": max(gaps),
    }


def gap_figures(running: list[Trace], late: Trace) -> Figures:
    """The waits of the running streams that the late prompt's prefill touched."""
    begun, ended = late.started, late.times[0]
    assert all(trace.times[-1] >= ended for trace in running), "a stream ended before the late prompt had its token"
    gaps = [end - start for trace in running for start, end in trace.gaps if end > begun and start < ended]
    return {"gap p99 s": harness.percentile(gaps, 0.99), "longest gap s": max(gaps), "late first token s": late.first_s}


def section_of(case: Case, found: dict[str, list[Figures]]) -> Section:
    rows = {side: harness.medians(rounds) for side, rounds in found.items()}
    return Section(title_of(case), rows, verdicts_of(case, rows), found)


def title_of(case: Case) -> str:
    if case.n_late:
        return f"{case.name}: a prompt of {case.n_late} tokens arrives among {case.n_prompts} streams"
    common = f"{case.n_common} common + " if case.n_common else ""
    return f"{case.name}: {case.n_prompts} prompts of {common}{case.n_own} own tokens, {case.n_out} out"


def verdicts_of(case: Case, rows: dict[str, dict[str, float]]) -> list[Verdict]:
    """How many times faster we are than the better layout of each peer."""

    def ratio(peer: str, figure: str) -> float:
        return min(row[figure] for side, row in rows.items() if side.startswith(peer)) / rows["kvasir"][figure]

    if case.name == "unshared":
        return [
            Verdict("llama-server's time / ours", ratio("llama-server", "wall s"), 1.0),
            Verdict("llama-batched-bench's time / ours", ratio("llama-batched-bench", "wall s"), 0.97),
        ]
    if case.name == "shared":
        return [Verdict("llama-server's time / ours", ratio("llama-server", "wall s"), 3.0)]
    return [Verdict("llama-server's p99 gap / ours", ratio("llama-server", "gap p99 s"), 5.0)]


if __name__ == "__main__":
    harness.run(main)
