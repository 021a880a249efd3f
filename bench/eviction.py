"""What giving up old turns costs: in quality, against reading anew and against keeping all; and in time.

A conversation of a system prompt, an old turn and a recent part is continued by a text that is known. Its perplexity is
measured three ways: with everything in memory; with the old turn cut out and the rest moved up, as
`evict="oldest"` does; with the rest read anew, as `evict="reprefill"` does. What is kept after a cut was computed while
the old turn could be seen, so the first two are close, and no exactness is claimed.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path

import harness
from harness import Figures, Report, Section, Verdict

from kvasir import native

# A cut conversation may be this much worse at continuing than one read anew.
MOST_WORSE = 1.1

SYSTEM = "You are a patient guide to the town of Lindow. You answer in plain sentences and never invent a street."
OLD = [
    "Tell me about the mill. The old mill stands by the river, below the bridge, and has not turned since the flood. "
    "Its wheel was sold to a farmer in the next valley, who uses it as a table in his garden, and its stones were "
    "carried up to the church, where they now form the steps.",
    "Who built the school? The school was built by the wool merchants in a single summer. They wanted clerks who could "
    "count bales and write letters to the coast, and they paid for the windows before they paid for the roof, so that "
    "the first winter was a cold one.",
    "Is there a market? There is a market every Thursday on the long square. Farmers bring cheese, eggs and, in fall, "
    "more apples than anyone can eat. The fish seller comes only when the road from the coast is dry.",
]
RECENT = (
    "Where can I sleep? There is an inn at the upper gate with nine rooms. The innkeeper is called Marta; she cooks a "
    "dish a day and tells you what it is only when it stands before you. Her brother keeps the stables behind the inn."
)
NEXT = [
    " What does it cost? A room at the inn costs less than a meal in the city, and Marta asks only that guests be back "
    "before the gate is closed. Those who come late knock at the stables, where her brother lets them in.",
    " Can I bring a dog? Dogs sleep in the stables with the horses. Marta's brother feeds them in the morning, and "
    "nobody pays for that. Cats, he says, come and go as they like and never stay at an inn.",
]


def main() -> int:
    """Measure, report, keep."""
    arguments = harness.options("What giving up old turns costs.", rounds=3).parse_args()
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    path = harness.model_path(arguments.model)
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    report = Report("eviction", "Giving up old turns", machine, path.name, {"rounds": arguments.rounds})
    report.sections = [measure(path, arguments.threads, arguments.rounds)]
    return harness.finish(report, arguments)


def measure(path: Path, threads: int, rounds: int) -> Section:
    model = native.Model.load(str(path))
    context = native.Context(model, n_ctx=2048, n_seq_max=1, threads=threads)
    found: dict[str, list[Figures]] = {"all kept": [], "cut": [], "read anew": []}
    for _ in range(rounds):
        for following in NEXT:
            for name, figures in cases(model, context, following).items():
                found[name].append(figures)
    rows = {name: harness.medians(each) for name, each in found.items()}
    for name, each in found.items():
        rows[name]["perplexity"] = math.exp(statistics.fmean(math.log(figures["perplexity"]) for figures in each))
    worse = rows["cut"]["perplexity"] / rows["read anew"]["perplexity"]
    verdicts = [
        Verdict("perplexity read anew / cut", 1 / worse, 1 / MOST_WORSE),
        Verdict("time to read anew / to cut", rows["read anew"]["seconds"] / rows["cut"]["seconds"]),
    ]
    return Section("A known continuation after an eviction", rows, verdicts, found)


def cases(model: native.Model, context: native.Context, following: str) -> dict[str, Figures]:
    vocab = model.vocab
    head, recent = vocab.tokenize(SYSTEM), vocab.tokenize(" " + RECENT, add_special=False)
    old = [token for text in OLD for token in vocab.tokenize(" " + text, add_special=False)]
    tail = vocab.tokenize(following, add_special=False)
    memory = context.memory

    memory.clear()
    read(context, [*head, *old, *recent], 0)
    kept = {"perplexity": perplexity(context, tail, len(head) + len(old) + len(recent)), "seconds": 0.0}

    memory.clear()
    read(context, [*head, *old, *recent], 0)
    started = time.perf_counter()
    memory.remove(0, len(head), len(head) + len(old))
    memory.shift(0, len(head) + len(old), None, -len(old))
    seconds = time.perf_counter() - started
    cut = {"perplexity": perplexity(context, tail, len(head) + len(recent)), "seconds": seconds}

    memory.remove(0, len(head), None)
    started = time.perf_counter()
    read(context, recent, len(head))
    seconds = time.perf_counter() - started
    anew = {"perplexity": perplexity(context, tail, len(head) + len(recent)), "seconds": seconds}
    return {"all kept": kept, "cut": cut, "read anew": anew}


def read(context: native.Context, tokens: list[int], at: int) -> None:
    for start in range(0, len(tokens), 256):
        step = context.step([native.Row(0, at + start, tokens[start : start + 256])])
        assert step.status == "ok", step.status


def perplexity(context: native.Context, tokens: list[int], at: int) -> float:
    """Of all tokens but the first, each given those before it."""
    total = 0.0
    for i, (token, following) in enumerate(itertools.pairwise(tokens)):
        step = context.step([native.Row(0, at + i, [token], output=True)])
        assert step.status == "ok", step.status
        logits = context.logits(0)
        most = max(logits)
        total += most + math.log(sum(math.exp(logit - most) for logit in logits)) - logits[following]
    return math.exp(total / (len(tokens) - 1))


if __name__ == "__main__":
    harness.run(main)
