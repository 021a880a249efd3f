"""One stream through `model.stream` against llama-bench: decode, decode with default sampling, prefill.

A generation of n + 1 tokens after a prompt of d gives its first token with the prefill and then makes n decodes at
depths d, d + 1, ...: exactly the work of `llama-bench -n N -d D`. Every round opens the model anew, as llama-bench
does, and measures several times: on a shared machine one figure strays by a quarter, and only the median of many tells.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Figures, Prompts, Report, Section, Verdict

import kvasir

TARGET = 0.97
BATCH = 512


def main() -> int:
    """Measure, report, keep."""
    arguments = parse()
    path = harness.model_path(arguments.model)
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    sides = sides_of(path, arguments)
    found = harness.alternate(sides, rounds=arguments.rounds)
    settings = {"tokens": arguments.tokens, "depth": arguments.depth, "prompt": arguments.prompt}
    settings |= {"batch": BATCH, "rounds": arguments.rounds, "repeats": arguments.repeats}
    report = Report("single_stream", "One stream, tokens per second", machine, path.name, settings)
    report.sections = [section_of(found)]
    return harness.finish(report, arguments)


def parse() -> argparse.Namespace:
    parser = harness.options("One stream through model.stream against llama-bench.", rounds=9)
    parser.add_argument("-n", "--tokens", type=int, default=128, help="decodes timed")
    parser.add_argument("-d", "--depth", type=int, default=16, help="tokens in the context before them")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each figure in a round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.prompt, arguments.repeats = 1, 16, 64, 1
    return arguments


def sides_of(path: Path, arguments: argparse.Namespace) -> dict[str, Callable[[int], Figures]]:
    return {
        "kvasir": lambda number: ours(path, arguments, number),
        "llama-bench": lambda _: theirs(path, arguments),
    }


def ours(path: Path, arguments: argparse.Namespace, number: int) -> Figures:
    """Decodes and prefill in a model each: cells left by one would slow the other, and llama-bench has none."""
    repeats = range(arguments.repeats)
    with opened(path, arguments) as model:
        prompts = Prompts(lambda text: model.tokenize(text, add_special=False))

        def decode(name: str, repeat: int = 0, **sampling: Any) -> float:
            prompt = prompts.of(arguments.depth, seed=(name, number, repeat))
            return decode_rate(model, prompt, arguments.tokens, **sampling)

        decode("warm up", temperature=0)  # as llama-bench does, so that memory is touched before it is timed
        greedy, sampled = [], []
        for repeat in repeats:
            greedy.append(decode("greedy", repeat, temperature=0))
            sampled.append(decode("sampled", repeat, seed=number))
    with opened(path, arguments) as model:
        prefill_rate(model, prompts.of(arguments.prompt, seed=("warm up", number)))
        prefill = [prefill_rate(model, prompts.of(arguments.prompt, seed=("timed", number, i))) for i in repeats]
    return {
        "decode": statistics.median(greedy),
        "decode, default sampling": statistics.median(sampled),
        "prefill": statistics.median(prefill),
    }


def opened(path: Path, arguments: argparse.Namespace) -> kvasir.Model:
    return kvasir.load(path, threads=arguments.threads, batch=BATCH, ubatch=BATCH, cache=False)


def decode_rate(model: kvasir.Model, prompt: list[int], n_tokens: int, **sampling: Any) -> float:
    """Tokens per second as the reader of a stream sees them, from the first piece on."""
    stream = model.stream(prompt, max_tokens=n_tokens + 1, ignore_eos=True, **sampling)
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        pass
    took = time.perf_counter() - started
    n_made = len(stream.result().tokens) - 1
    assert n_made == n_tokens, f"wanted {n_tokens} tokens after the first, got {n_made}"
    return n_made / took


def prefill_rate(model: kvasir.Model, prompt: list[int]) -> float:
    """Prompt tokens computed per second of the time to a first token; the queue and the sampling are part of it."""
    started = time.perf_counter()
    completion = model.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True)
    took = time.perf_counter() - started
    return (len(prompt) - completion.usage.cached_tokens) / took


def theirs(path: Path, arguments: argparse.Namespace) -> Figures:
    same = ("-m", path, "-t", arguments.threads, "-b", BATCH, "-ub", BATCH, "-r", arguments.repeats)
    (decode,) = harness.llama_bench(*same, "-p", 0, "-n", arguments.tokens, "-d", arguments.depth)
    (prefill,) = harness.llama_bench(*same, "-p", arguments.prompt, "-n", 0)
    return {"decode": statistics.median(decode["samples_ts"]), "prefill": statistics.median(prefill["samples_ts"])}


def section_of(found: dict[str, list[Figures]]) -> Section:
    rows = {side: harness.medians(rounds) for side, rounds in found.items()}
    us, them = rows["kvasir"], rows["llama-bench"]
    verdicts = [
        Verdict("greedy decode, of llama-bench", us["decode"] / them["decode"], TARGET),
        Verdict("decode with default sampling, of llama-bench", us["decode, default sampling"] / them["decode"]),
        Verdict("prefill, of llama-bench", us["prefill"] / them["prefill"]),
    ]
    return Section("Tokens per second, medians", rows, verdicts, found)


if __name__ == "__main__":
    harness.run(main)
