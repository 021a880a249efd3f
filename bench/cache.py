"""The cache against computing, against a cache of whole states, and against llama-server's prompt cache.

Five parts, each with a result of its own: `first-token` (a long prompt from each tier), `bytes-written` (a conversation
of 20 turns), `no-hits` (what a cache costs that never helps), `conversations` (many over few slots) and `block-size`.
Every part has its own empty cache folder beside the real one; the user's rows are neither read nor written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import cache_conversations
import cache_rig
import harness
import llama_server
from cache_conversations import Load
from cache_rig import MB, Setup
from harness import Figures, Report, Section, Verdict

import kvasir
from kvasir import native
from kvasir.cache import Cache, CacheSettings, Needs, Reason, Space
from kvasir.config import load_settings, store_settings
from kvasir.engine.events import Ticked
from kvasir.model.weights import Weights
from kvasir.service.caching import bind

BLOCK_SIZES = (64, 128, 256, 512)
N_PLACES = 4


def main() -> int:
    """Measure the chosen parts, report and keep each."""
    arguments = parse()
    path = harness.model_path(arguments.model)
    machine = harness.quiet_machine(threads=arguments.threads, accept_busy=arguments.busy_ok or arguments.quick)
    setup = cache_rig.setup_of(path, arguments.threads)
    code = 0
    for name in arguments.only:
        harness.say(f"part {name}")
        part = PARTS[name](setup, arguments)
        settings = {"block": CacheSettings().block_tokens, **part.settings}
        report = Report(f"cache-{name}", part.title, machine, path.name, settings, [part.section])
        code = max(code, harness.finish(report, arguments))
    return code


def parse() -> argparse.Namespace:
    parser = harness.options("What the cache gains and what it costs. Rounds 0: as many as a part needs.", rounds=0)
    parser.set_defaults(model="smollm2@q8_0", threads=2)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="which parts")
    parser.add_argument("--layout", choices=["unified", "split"], default="unified", help="of `conversations`")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = arguments.rounds or 1
    return arguments


class Part:
    """What one part found, under its title."""

    def __init__(self, title: str, section: Section, **settings: object) -> None:
        self.title = title
        self.section = section
        self.settings = settings


# A long prompt from each tier


def first_token(setup: Setup, arguments: argparse.Namespace) -> Part:
    """One prompt is computed and kept; then every tier gives it to engines that know nothing of it."""
    n_tokens, rounds = (512 if arguments.quick else 4096), arguments.rounds or 3
    prompt = setup.words.of(n_tokens, seed="kept")
    with ExitStack() as stack:
        folder = stack.enter_context(cache_rig.disk_folder())
        kept = stack.enter_context(cache_rig.open_cache(disk=folder))
        harness.say(f"computing {n_tokens} tokens, to be kept")
        with cache_rig.open_model(setup, kept) as model:
            generate(model, prompt, 2)
        kept.flush()
        files, n_bytes = cache_rig.rows_in(folder), row_bytes(folder)
        plain = stack.enter_context(cache_rig.disk_folder()) / "plain"
        cache_rig.write_plain(plain, n_bytes)
        places: dict[str, Callable[[], AbstractContextManager[Cache]]] = {"RAM": lambda: nullcontext(kept)}
        if (copy := stack.enter_context(cache_rig.tmpfs_copy(folder))) is not None:
            places["tmpfs"] = partial(cache_rig.open_cache, tmpfs=copy)
        places["disk"] = places["disk, in the page cache"] = partial(cache_rig.open_cache, disk=folder)
        sides: dict[str, Callable[[int], Figures]] = {
            "cold": lambda number: from_nothing(setup, setup.words.of(n_tokens, seed=("cold", number))),
            "cold, llama-server": lambda number: from_nothing_there(
                setup, setup.words.of(n_tokens, seed=("cold", number))
            ),
            **{
                place: partial(from_cache, setup, prompt, at, open_cache, files if place == "disk" else [])
                for at, (place, open_cache) in enumerate(places.items())
            },
        }
        sides["disk, one plain file"] = lambda _: {"MB/s": cache_rig.read_speed(plain) / MB}
        found = harness.alternate(sides, rounds=rounds)
        rows = {side: harness.medians(each) for side, each in found.items()}
        verdicts = first_token_verdicts(rows, n_bytes)
    title = f"{n_tokens} tokens, {n_bytes / MB:.0f} MB of rows; another end: its last token is another"
    return Part(
        "First token of a long prompt, engine fresh", Section(title, rows, verdicts, found), rounds=rounds, slots=4
    )


def from_nothing(setup: Setup, prompt: list[int]) -> Figures:
    """The cache is on and empty: what a first visitor waits for."""
    with (
        cache_rig.disk_folder() as folder,
        cache_rig.open_cache(disk=folder) as cache,
        cache_rig.open_model(setup, cache) as model,
    ):
        return {"first token s": generate(model, prompt, 1)[0]}


def from_nothing_there(setup: Setup, prompt: list[int]) -> Figures:
    """The same with llama-server, which has seen nothing either: what computing costs without Kvasir's attention."""
    sizes = {"context": 2 * len(prompt), "batch": 2048, "ubatch": 512, "slots": 1}
    with llama_server.serving(setup.path, threads=setup.threads, unified=False, **sizes) as port:
        llama_server.stream_all(port, [setup.words.of(cache_rig.WARM_UP_TOKENS, seed="warm up")], n_tokens=2)
        return {"first token s": llama_server.stream_all(port, [prompt], n_tokens=1)[0].first_s}


def from_cache(
    setup: Setup,
    prompt: list[int],
    place: int,
    open_cache: Callable[[], AbstractContextManager[Cache]],
    drop: Sequence[Path],
    number: int,
) -> Figures:
    """Two fresh engines: the same prompt, whose first token needs no KV, and one with another end, which needs it."""
    other = [*prompt[:-1], prompt[-1] + 1 + number * N_PLACES + place]  # nobody else's end
    first_s, n_cached, _ = restored(setup, open_cache, prompt, drop)
    assert n_cached == len(prompt), f"{n_cached} of {len(prompt)} tokens came from the cache"
    other_s, n_cached, from_medium = restored(setup, open_cache, other, drop)
    assert n_cached == len(prompt) - 1, f"{n_cached} of {len(prompt)} tokens came from the cache"
    return {"first token s": first_s, "another end s": other_s, "MB from the medium": from_medium}


def restored(
    setup: Setup,
    open_cache: Callable[[], AbstractContextManager[Cache]],
    prompt: list[int],
    drop: Sequence[Path],
) -> tuple[float, int, float]:
    """Seconds, tokens from the cache, and MB read from the medium, of a fresh engine's answer."""
    with open_cache() as cache, cache_rig.open_model(setup, cache) as model:
        cache_rig.drop_pages(*drop)
        before = cache_rig.medium_bytes()
        seconds, n_cached = generate(model, prompt, 1)
        return seconds, n_cached, (cache_rig.medium_bytes() - before) / MB


def generate(model: kvasir.Model, prompt: list[int], n_tokens: int) -> tuple[float, int]:
    """Seconds until the caller has these tokens, and how many of the prompt were not computed."""
    started = time.perf_counter()
    done = model.generate(prompt, **cache_rig.greedy(n_tokens))
    return time.perf_counter() - started, done.usage.cached_tokens


def first_token_verdicts(rows: dict[str, dict[str, float]], n_bytes: int) -> list[Verdict]:
    """Against our own cold prompt, and beside it against llama-server's, which is slower."""
    cold_s, theirs_s = rows["cold"]["first token s"], rows["cold, llama-server"]["first token s"]
    for row in rows.values():
        if "first token s" in row:
            row["times faster"] = cold_s / row["first token s"]
            row["than llama-server"] = theirs_s / row["first token s"]
    tiers = {name: target for name, target in (("RAM", 300), ("tmpfs", 200), ("disk", 100)) if name in rows}
    verdicts = [Verdict(f"cold / {name}", rows[name]["times faster"], target) for name, target in tiers.items()]
    # Another end needs the KV: all of it is read, imported, and decoded over.
    verdicts += [Verdict(f"cold / {name}, another end", cold_s / rows[name]["another end s"]) for name in tiers]
    # Search, import and the one decode count against it: a difference of two medians would be kinder, and noise.
    rows["disk"]["MB/s"] = n_bytes / rows["disk"]["another end s"] / MB
    share = rows["disk"]["MB/s"] / rows["disk, one plain file"]["MB/s"]
    return [*verdicts, Verdict("another end from disk: rows' bytes per second / reading one plain file", share)]


def row_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in cache_rig.rows_in(folder))


# A conversation


def bytes_written(setup: Setup, arguments: argparse.Namespace) -> Part:
    """Each turn sends the whole conversation; what its cache writes is read from the cache's own counter."""
    n_turns, n_message, n_out = (4 if arguments.quick else 20), 90, 32
    rows: dict[str, dict[str, float]] = {}
    said: list[int] = []
    with (
        cache_rig.disk_folder() as folder,
        cache_rig.open_cache(disk=folder) as cache,
        cache_rig.open_model(setup, cache) as model,
    ):
        per_token = 0.0
        for turn in range(n_turns):
            before, n_before = cache.stats(), len(said)
            said += setup.words.of(n_message, seed=("turn", turn))
            said += model.generate(said, **cache_rig.greedy(n_out)).tokens
            after = settled(cache, model)
            per_token = per_token or row_bytes(folder) / (len(said) - 1)
            rows[f"turn {turn + 1}"] = {
                "new tokens": len(said) - n_before,
                "tokens": len(said),
                "MB written": (after.bytes_written - before.bytes_written) / MB,
                "MB of new tokens": (len(said) - n_before) * per_token / MB,
                "MB a whole state writes": len(said) * per_token / MB,
            }
    return Part(
        "Bytes written in a conversation",
        Section(f"{n_turns} turns of {n_message} tokens and {n_out} in reply", rows, written_verdicts(rows)),
        turns=n_turns,
    )


def settled(cache: Cache, model: kvasir.Model) -> Any:
    """The counters once the turn's last row is written: the engine offers it just after the reply's end."""
    while model.stats().slots_used:
        time.sleep(0.01)
    cache.flush()
    return cache.stats()


def written_verdicts(rows: dict[str, dict[str, float]]) -> list[Verdict]:
    turns = list(rows.values())
    half = len(turns) // 2
    totals = {name: sum(turn[name] for turn in turns) for name in turns[0] if name != "tokens"}
    rows["all"] = totals
    early, late = (sum(turn["MB written"] for turn in part) for part in (turns[:half], turns[-half:]))
    # A whole state gives 0.36 here. Below 20 turns it is a matter of where the last tail happens to end.
    least = 0.8 if len(turns) >= 20 else None
    return [
        Verdict("written in the first half / in the second half", early / late, least),
        Verdict("written / bytes of the new tokens", totals["MB written"] / totals["MB of new tokens"]),
        Verdict("a whole state / written", totals["MB a whole state writes"] / totals["MB written"]),
    ]


# A cache that never helps


def no_hits(setup: Setup, arguments: argparse.Namespace) -> Part:
    """Streams that have nothing in common, with a cache and without."""
    n_streams, n_prompt, n_out = (2, 64, 64) if arguments.quick else (4, 288, 128)
    rounds = arguments.rounds or 5
    run = partial(streams, setup, n_streams=n_streams, n_prompt=n_prompt, n_out=n_out)

    def cache_on(number: int) -> Figures:
        with cache_rig.disk_folder() as folder, cache_rig.open_cache(disk=folder) as cache:
            figures = run(number, cache)
            cache.flush()
            stats = cache.stats()
            assert stats.bytes_written > 0, "the cache was to save"
            assert stats.hits == 0, "the cache was to find nothing"
            on_engine = (stats.export_ns + stats.search_ns) / 1e9
            return {**figures, "cache threads CPU s": cache_rig.cache_cpu_s(), "on the engine thread s": on_engine}

    found = harness.alternate({"cache off": lambda number: run(number, None), "cache on": cache_on}, rounds=rounds)
    rows = {side: harness.medians(each) for side, each in found.items()}
    off, on = found["cache off"], found["cache on"]
    verdicts = [
        Verdict("throughput, on / off", harness.ratio(on, off, "tokens/s"), 0.95),
        # 1 / 1.25: a ratio above 1 means that the cache is no slower, here as everywhere.
        Verdict("p99 tick, off / on", harness.ratio(off, on, "tick p99 ms"), 0.8),
        Verdict("p99 tick that only decodes, off / on", harness.ratio(off, on, "decode tick p99 ms"), 0.8),
    ]
    title = f"{n_streams} streams of {n_prompt} tokens, {n_out} out"
    return Part("A cache without hits", Section(title, rows, verdicts, found), rounds=rounds, slots=n_streams)


def streams(
    setup: Setup, number: int, cache: Cache | None, *, n_streams: int, n_prompt: int, n_out: int
) -> dict[str, float]:
    ticks: list[Ticked] = []

    def observe(event: object) -> None:
        if isinstance(event, Ticked):
            ticks.append(event)

    prompts = [setup.words.of(n_prompt, seed=("no hits", number, i), first=i) for i in range(n_streams)]
    with cache_rig.open_model(setup, cache, observe=observe, slots=n_streams) as model:
        ticks.clear()
        started = time.perf_counter()
        running = [model.stream(prompt, **cache_rig.greedy(n_out)) for prompt in prompts]
        n_tokens = sum(len(stream.result().tokens) for stream in running) + n_streams * n_prompt
        seconds = time.perf_counter() - started
    decoding = [tick for tick in ticks if not tick.n_prefill_rows]
    return {
        "tokens/s": n_tokens / seconds,
        "tick p99 ms": harness.percentile(map(tick_ms, ticks), 0.99),
        "decode tick p50 ms": harness.percentile(map(tick_ms, decoding), 0.5),
        "decode tick p99 ms": harness.percentile(map(tick_ms, decoding), 0.99),
    }


def tick_ms(tick: Ticked) -> float:
    return 1e3 * (tick.plan_s + tick.native_s + tick.apply_s)


# Many conversations over few slots


def conversations(setup: Setup, arguments: argparse.Namespace) -> Part:
    """Ours and llama-server's prompt cache, once each unless --rounds says more: a round takes minutes."""
    load, rounds = cache_conversations.QUICK if arguments.quick else Load(), arguments.rounds or 1
    sides: dict[str, Callable[[int], Figures]] = {
        "kvasir": lambda _: cache_conversations.kvasir_side(load, setup, arguments.layout),
        "llama-server": lambda _: cache_conversations.server_side(load, setup, arguments.layout),
    }
    found = harness.alternate(sides, rounds=rounds)
    rows = {side: harness.medians(each) for side, each in found.items()}
    ours, theirs = rows["kvasir"], rows["llama-server"]
    verdicts = [
        Verdict(f"llama-server's {figure} / ours", theirs[figure] / ours[figure])
        for figure in ("first token p50 s", "first token p95 s", "tokens prefilled", "wall s")
    ]
    title = f"{load.n_conversations} conversations of {load.n_turns} turns over {load.slots} slots: "
    title += f"{load.n_conversations * load.longest} tokens, {load.context} cells"
    settings = {**asdict(load), "layout": arguments.layout, "rounds": rounds}
    return Part("Conversations beyond the context", Section(title, rows, verdicts, found), **settings)


# Block size


def block_size(setup: Setup, arguments: argparse.Namespace) -> Part:
    """One sequence, kept and restored in blocks of each size, without an engine in between."""
    n_tokens, rounds = (512 if arguments.quick else 2048), arguments.rounds or 5
    tokens = setup.words.of(n_tokens, seed="blocks")
    settings = load_settings({"threads": setup.threads})
    weights = Weights.open(setup.path, settings, core=native)
    context = native.Context(weights.native, n_ctx=2 * n_tokens, n_seq_max=2, threads=setup.threads, poll=0)
    try:
        harness.say(f"computing {n_tokens} tokens, to be cut into blocks")
        for at in range(0, n_tokens, context.n_batch):
            assert context.step([native.Row(0, at, tokens[at : at + context.n_batch])]).status == "ok"
        with cache_rig.open_cache() as cache:
            space = bind(cache, weights, settings, store_settings(), core=native).space(None, context.n_ctx_seq)
        sides: dict[str, Callable[[int], Figures]] = {
            f"{block} tokens": partial(block_figures, context.memory, space, tokens, block) for block in BLOCK_SIZES
        }
        found = harness.alternate(sides, rounds=rounds)
    finally:
        context.close()
        weights.close()
    rows = {side: harness.medians(each) for side, each in found.items()}
    default = rows[f"{CacheSettings().block_tokens} tokens"]
    verdicts = [
        Verdict(f"least {figure} / the default's", min(row[figure] for row in rows.values()) / default[figure])
        for figure in ("save s", "restore from disk s", "restore from RAM s", "written / new, a conversation")
    ]
    title = f"{n_tokens} tokens, kept and restored"
    return Part("Block size", Section(title, rows, verdicts, found), rounds=rounds)


def block_figures(memory: native.Memory, space: Space, tokens: list[int], block: int, _: int) -> Figures:
    with cache_rig.disk_folder() as folder:
        figures = saved(memory, space, tokens, block, folder)
        with cache_rig.open_cache(disk=folder, block_tokens=block) as cache:
            cache_rig.drop_pages(*cache_rig.rows_in(folder))
            figures |= {f"{step} from disk s": s for step, s in restore(memory, space, tokens, cache).items()}
            figures["restore from RAM s"] = restore(memory, space, tokens, cache)["restore"]
    with cache_rig.disk_folder() as folder:
        return figures | {"written / new, a conversation": written_in_turns(memory, space, tokens, block, folder)}


def saved(memory: native.Memory, space: Space, tokens: list[int], block: int, folder: Path) -> dict[str, float]:
    """What the engine thread pays for the longest copy, and what all of it takes until it is on the disk."""
    longest_s = 0.0
    with cache_rig.open_cache(disk=folder, block_tokens=block) as cache:
        started = time.perf_counter()
        for at in range(0, len(tokens), block):
            begun = time.perf_counter()
            offer(memory, space, tokens, cache, at, at + block)
            longest_s = max(longest_s, time.perf_counter() - begun)
        offered_s = time.perf_counter() - started
        cache.flush()
        save_s, cpu_s = time.perf_counter() - started, cache_rig.cache_cpu_s()
    files = cache_rig.rows_in(folder)
    kv_bytes = len(memory.export_span(0, 0, len(tokens)))
    return {
        "rows": len(files),
        "row KB": files[0].stat().st_size / 1e3,
        "longest offer ms": 1e3 * longest_s,
        "offers s": offered_s,
        "save s": save_s,
        "save CPU s": cpu_s,
        "overhead %": 100 * (sum(512 * path.stat().st_blocks for path in files) / kv_bytes - 1),
    }


def offer(memory: native.Memory, space: Space, tokens: list[int], cache: Cache, start: int, end: int) -> None:
    parts = {"base": memory.export_span(0, start, end)}
    cache.offer(space, tokens, start=start, end=end, parts=parts, reason=Reason.COLD)


def restore(memory: native.Memory, space: Space, tokens: list[int], cache: Cache) -> Mapping[str, float]:
    started = time.perf_counter()
    match = cache.longest(space, tokens, needs=Needs(trim=True))
    searched = time.perf_counter()
    parts = cache.read(match).result()
    read = time.perf_counter()
    assert match.n_tokens == len(tokens), f"{match.n_tokens} of {len(tokens)} tokens were found"
    assert memory.import_span(1, 0, [part["base"] for part in parts])
    ended = time.perf_counter()
    match.release()
    memory.remove(1, 0, None)
    return {"search": searched - started, "read": read - searched, "import": ended - read, "restore": ended - started}


def written_in_turns(memory: native.Memory, space: Space, tokens: list[int], block: int, folder: Path) -> float:
    """Bytes that a conversation writes for each byte of its new tokens: a tail that grows is written again."""
    n_turn, n_offered = 122, 0
    with cache_rig.open_cache(disk=folder, block_tokens=block) as cache:
        ends = range(n_turn, len(tokens) + 1, n_turn)
        for end in ends:
            for at in range(n_offered, end, block):
                offer(memory, space, tokens, cache, at, min(at + block, end))
            n_offered = end - end % block
        cache.flush()
        new_bytes = len(memory.export_span(0, 0, ends[-1]))
        return cache.stats().bytes_written / new_bytes


PARTS: dict[str, Callable[[Setup, argparse.Namespace], Part]] = {
    "first-token": first_token,
    "bytes-written": bytes_written,
    "no-hits": no_hits,
    "conversations": conversations,
    "block-size": block_size,
}


if __name__ == "__main__":
    harness.run(main)
