"""JSON schemas of the real world: how many become grammars, and whether what these admit is right.

Downloads packages that carry schemas through pip and npm, as the user has configured them, checks their hashes, and
takes the schemas out: files of their own, and the named parts of OpenAPI documents and collections, with all they refer
to. Each is accepted or refused with a reason. For each accepted one, random texts of its grammar are read as JSON and
validated against the schema, and llama.cpp is asked whether it admits them: a text that is not valid is *wrong*, unless
a keyword that is reported as not enforced forbids it, and then reading it must fail.

    .venv/bin/python bench/schemas.py [--quick] [--only name]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import harness

from kvasir import native
from kvasir.config import store_settings
from kvasir.errors import BadGrammar, BadSchema
from kvasir.model.grammar.schema import Compiled, compile_schema

sys.path.insert(0, str(harness.ROOT / "tools"))
from grammar_walk import Walk

N_TEXTS = 20  # of each schema
N_ADMITTED = 3  # of these, given to llama.cpp: it takes milliseconds a token on a large grammar
SLOW_S = 10.0
MAX_PARTS = 150  # of one document; drawn with a fixed seed


@dataclass(frozen=True)
class Package:
    """A package with schemas: how to get it, and what to take."""

    name: str
    kind: str  # "pip" or "npm"
    version: str
    sha256: str
    files: tuple[str, ...]
    parts: str = ""  # where in each file the named schemas are; "" for the file itself
    about: str = ""
    n_most: int = MAX_PARTS


PACKAGES = (
    Package("check-jsonschema", "pip", "0.39.0",
            "14ce5c94871c551268ea948ffe21e9f1464dc48fb20bf9a4c13deeaaf756cf9b",
            ("*/vendor/*.json", "*/custom/*.json"), about="CI and tool files"),
    Package("@octokit/openapi", "npm", "23.0.2",
            "71a18407dd5e8464f4e0525daf03deabbe65abd9287d6adc7b5d98f516cd0d0c",
            ("*/generated/api.github.com.json",), "components/schemas",
            "GitHub's API"),
    Package("kubernetes-validate", "pip", "1.37.0",
            "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
            ("*/v1.37.0-local/_definitions.json",), "$defs",
            "Kubernetes objects"),
    Package("cfn-lint", "pip", "1.58.0",
            "9d9f06043160756a6158f5c3f92a44ce38254b1c578127461608305bc8262987",
            ("cfnlint/data/schemas/resources/*.json",), about="CloudFormation", n_most=120),
    Package("@cyclonedx/cyclonedx-library", "npm", "10.3.0",
            "9833bd949052eb18218dd64b13ad62d9246f7395eef01c66dad08fcbacf74f01",
            ("*/res/schema/*.json",), about="bills of materials"),
    Package("@asyncapi/specs", "npm", "6.11.1",
            "01af8744dc33c0c7eb2e908f6a955319ee58b70ecadc9387d1aeb16c0cd28928",
            ("*/schemas/?.?.?-without-$id.json",), about="AsyncAPI"),
    Package("altair", "pip", "6.3.0",
            "7defb6ca730676dfc99a299768e2769f51585fcb3dc960ea71aacc368929d65e",
            ("*/vega-lite-schema.json",), "definitions", "Vega-Lite charts", 60),
    Package("nbformat", "pip", "5.11.1",
            "cc6698fa75f4fab8755ead786317815f13a6fee3b53311c0abb1a8b51d52f7ec",
            ("nbformat/*.json",), about="notebooks"),
    Package("openapi-spec-validator", "pip", "0.9.0",
            "222fecffc7714f6d0a6ad62c0e4b66cc2b7dbfafb7b93acfc6c308abbdb51af8",
            ("*/schemas/*.json",), about="OpenAPI itself"),
    Package("validate-pyproject", "pip", "0.27",
            "6ad8a9a80480a5a833753f4e1c1b22cb01b8a5ad0015b1e9dbd4a5f8e898aba0",
            ("*.schema.json",), about="pyproject.toml"),
    Package("geojson-schema", "npm", "1.0.5",
            "4640419013eb64812352745ef8b73b56785c633a88e73b9b1733e97a6dfbd711",
            ("package/[A-Z]*.json",), about="GeoJSON"),
    Package("jsonschema-specifications", "pip", "2025.9.1",
            "98802fee3a11ee76ecaca44429fda8a41bff98b00a0f2838151b113f210cc6fe",
            ("*/metaschema.json",), about="JSON Schema itself"),
)  # fmt: skip


@dataclass
class Tally:
    """What became of the schemas of one package."""

    about: str
    n: int = 0
    n_enforced: int = 0
    n_checked: int = 0
    n_texts: int = 0
    n_caught: int = 0
    n_admitted: int = 0
    n_slow: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unenforced: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def main() -> int:
    """Download, convert, sample, validate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten schemas of each package; keeps no result")
    parser.add_argument("--only", default="", help="packages whose name has this in it")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="the folder for the result")
    arguments = parser.parse_args()
    folder = store_settings().home / "schemas"
    vocab = native.Model.load(str(harness.model_path("smollm2")), vocab_only=True).vocab
    tallies: dict[str, Tally] = {}
    for package in PACKAGES:
        if arguments.only in package.name:
            found = list(schemas_of(package, fetched(package, folder)))
            tallies[f"{package.name} {package.version}"] = tally(
                package, found[:10] if arguments.quick else found, vocab
            )
    print(report(tallies))
    if not arguments.quick and not arguments.only:
        (arguments.out / "schemas.md").write_text(report(tallies), encoding="utf-8")
    return 1 if any(each.wrong for each in tallies.values()) else 0


# Packages


def fetched(package: Package, folder: Path) -> Path:
    """The package's archive, downloaded once and checked."""
    place = folder / f"{package.name.replace('/', '-').lstrip('@')}-{package.version}"
    if not place.is_dir():
        fresh = place.with_name(place.name + ".part")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        harness.say(f"fetching {package.name} {package.version}")
        _download(package, fresh)
        fresh.rename(place)
    archive = next(place.iterdir())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise harness.Unable(f"{package.name} has the sha256 {digest}, not {package.sha256}; remove {place.name}.")
    return archive


def _download(package: Package, folder: Path) -> None:
    commands = {
        "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                "--dest", str(folder), f"{package.name}=={package.version}"],
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"],
    }  # fmt: skip
    try:
        subprocess.run(commands[package.kind], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise harness.Unable(f"{package.name} could not be downloaded with {package.kind}: {error}.") from None


def schemas_of(package: Package, archive: Path) -> Iterator[tuple[str, Any]]:
    """Every schema of a package with its name; no more than a part of a large collection."""
    found: list[tuple[str, Any]] = []
    for name, text in _files(archive):
        if any(fnmatch(name, pattern) for pattern in package.files):
            document = json.loads(text)
            found += list(_parts(document, package.parts)) if package.parts else [(name.rsplit("/", 1)[-1], document)]
    found.sort(key=lambda item: item[0])
    if len(found) > package.n_most:
        found = sorted(random.Random(1).sample(found, package.n_most), key=lambda item: item[0])
    return iter(found)


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".json"))
        return
    with tarfile.open(archive) as package:
        for member in package:
            if (
                member.name.endswith(".json")
                and not member.name.endswith("deref.json")
                and (file := package.extractfile(member))
            ):
                yield member.name, file.read()


def _parts(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The named schemas of a document, each with what it refers to and nothing else."""
    named: dict[str, Any] = document
    for step in path.split("/"):
        named = named[step]
    for name in named:
        needed = _reachable(named, name, f"#/{path}/")
        kept: Any = {each: named[each] for each in needed}
        for step in reversed(path.split("/")):
            kept = {step: kept}
        yield name, {"$ref": f"#/{path}/{name.replace('~', '~0').replace('/', '~1')}", **kept}


def _reachable(named: dict[str, Any], start: str, prefix: str) -> list[str]:
    seen: dict[str, None] = {}
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen or name not in named:
            continue
        seen[name] = None
        todo += [ref.removeprefix(prefix) for ref in _refs(named[name]) if ref.startswith(prefix)]
    return list(seen)


def _refs(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from _refs(value)
    elif isinstance(part, list):
        for value in part:
            yield from _refs(value)


# Judging


def tally(package: Package, schemas: list[tuple[str, Any]], vocab: native.Vocab) -> Tally:
    """Convert each schema, and look at what its grammar admits."""
    harness.say(f"{package.name}: {len(schemas)} schemas")
    total = Tally(package.about, n=len(schemas))
    for name, schema in schemas:
        start = time.perf_counter()
        try:
            compiled = compile_schema(json.dumps(schema))
        except BadSchema as error:
            total.refused[_reason(str(error))] += 1
            continue
        finally:
            took = time.perf_counter() - start
            total.slowest_s = max(total.slowest_s, took)
            total.n_slow += took > SLOW_S
        total.unenforced.update(compiled.unenforced)
        if compiled.unenforced:
            total.n_checked += 1
        else:
            total.n_enforced += 1
        judge(name, compiled, vocab, total)
    return total


def judge(name: str, compiled: Compiled, vocab: native.Vocab, total: Tally) -> None:
    """Draw texts from a grammar; read them, and ask llama.cpp."""
    root = "root" if "root" in compiled.rules else compiled.grammar.partition("::= ")[2].partition("\n")[0]
    walk = Walk(compiled.rules)
    texts = [walk.text(root, seed) for seed in range(N_TEXTS)]
    for text in texts:
        total.n_texts += 1
        try:
            compiled.check(text)
        except BadSchema as error:
            total.n_caught += 1
            broken = str(error).partition("breaks '")[2].partition("'")[0]
            if not _explained(broken, compiled.unenforced):
                total.wrong.append(f"{name}: {error} {text[:200]!r}")
    try:
        for text in texts[:N_ADMITTED]:
            total.n_admitted += _follow(compiled.grammar, text, vocab)
    except BadGrammar as error:
        total.wrong.append(f"{name}: llama.cpp says {error} {text[:200]!r}")


def _explained(keyword: str, unenforced: tuple[str, ...]) -> bool:
    """Whether a keyword that is known not to be enforced can be what a reply broke, or holds what it broke."""
    inner = {"oneOf", "not", "if", "anyOf", "dependencies", "dependentSchemas", "contains", "patternProperties"}
    return bool(unenforced) and (keyword in unenforced or keyword in inner or bool(inner.intersection(unenforced)))


def _follow(grammar: str, text: str, vocab: native.Vocab) -> bool:
    """Give a text to llama.cpp's grammar. False where this vocabulary cannot spell it: some lack a byte."""
    tokens = vocab.tokenize(text, add_special=False)
    if vocab.detokenize(tokens).decode(errors="replace") != text:
        return False
    params = native.SamplerParams()
    params.grammar = grammar
    sampler = native.Sampler(vocab, params)
    for token in tokens:
        sampler.accept(token)
    sampler.accept(vocab.eos)
    return True


_REASONS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("refers to something outside of the schema", lambda text: "outside of it" in text),
    ("refers to something that is not there", lambda text: "does not have" in text),
    ("parts with an $id of their own", lambda text: "the $id" in text),
    ("$dynamicRef or $recursiveRef", lambda text: "ynamicRef" in text or "ecursiveRef" in text),
    ("a pattern that Python's re cannot read", lambda text: "is not a 'regex'" in text),
    ("not valid JSON Schema", lambda text: "not valid JSON Schema" in text),
    ("too many alternatives at one place", lambda text: "alternatives" in text),
    ("more than 10,000 rules", lambda text: "grammar rules" in text),
    ("a length or count above 2,000", lambda text: "counts to" in text),
    ("written in draft 3", lambda text: "draft 3" in text),
    ("more than 512 KiB", lambda text: "KiB" in text),
    ("no value satisfies it", lambda text: "admits no value" in text),
)


def _reason(text: str) -> str:
    return next((reason for reason, test in _REASONS if test(text)), text[:100])


# The report


def report(tallies: dict[str, Tally]) -> str:
    """The result as Markdown."""
    return "\n".join([*_summary(tallies), *_by_package(tallies), *_counts(tallies), *_wrongs(tallies)]) + "\n"


def _summary(tallies: dict[str, Tally]) -> list[str]:
    every = list(tallies.values())
    n_wrong = sum(len(t.wrong) for t in every)
    n, n_enforced, n_checked = (sum(getattr(t, name) for t in every) for name in ("n", "n_enforced", "n_checked"))
    n_texts, n_caught, n_admitted = (
        sum(getattr(t, name) for t in every) for name in ("n_texts", "n_caught", "n_admitted")
    )
    return [
        "# JSON schemas of the real world",
        "",
        f"{n:,} schemas: {n_enforced + n_checked:,} accepted ({n_enforced:,} enforced whole by their grammar, "
        f"{n_checked:,} with keywords that only the check of a reply enforces), "
        f"{n - n_enforced - n_checked:,} refused with a reason, {n_wrong} wrong.",
        "",
        f"{n_texts:,} random texts of the grammars were read and validated with the jsonschema package; {n_caught:,} "
        "broke a keyword that is reported as not enforced, and reading them failed as it must. "
        f"{n_admitted:,} of the texts were admitted by llama.cpp. A text that broke any other keyword, or that "
        "llama.cpp did not admit, counts as wrong. "
        f"The slowest schema took {max((t.slowest_s for t in every), default=0):.1f} s to convert.",
        "",
        "Made by `bench/schemas.py`, which names the versions and hashes of the packages.",
        "",
    ]


def _by_package(tallies: dict[str, Tally]) -> list[str]:
    lines = ["| package | what | schemas | enforced | with checks | refused | wrong |", "|---|---|--:|--:|--:|--:|--:|"]
    for name, t in tallies.items():
        cells = [name, t.about, t.n, t.n_enforced, t.n_checked, t.refused.total(), len(t.wrong)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def _counts(tallies: dict[str, Tally]) -> list[str]:
    refused = sum((t.refused for t in tallies.values()), Counter[str]())
    unenforced = sum((t.unenforced for t in tallies.values()), Counter[str]())
    lines = [
        "| refused because | schemas |",
        "|---|--:|",
        *(f"| {why} | {n} |" for why, n in refused.most_common()),
        "",
    ]
    lines += ["| keyword that only the check enforces | schemas |", "|---|--:|"]
    return [*lines, *(f"| `{keyword}` | {n} |" for keyword, n in unenforced.most_common())]


def _wrongs(tallies: dict[str, Tally]) -> list[str]:
    wrong = [line for t in tallies.values() for line in t.wrong]
    return ["", "Wrong:", "", *(f"- {line}" for line in wrong[:50])] if wrong else []


if __name__ == "__main__":
    harness.run(main)
