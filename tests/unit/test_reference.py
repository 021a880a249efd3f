"""References: what each form means, and what is said of one that cannot be read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.errors import BadOption
from kvasir.model.reference import KNOWN, HubFile, LocalFile, Member, Packaged, known_for, name_for, parse
from kvasir.model.store import folder_name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("model.gguf", LocalFile(Path("model.gguf"))),
        ("~/m/model.gguf", LocalFile(Path("~/m/model.gguf"))),
        ("./smollm2", LocalFile(Path("./smollm2"))),
        ("./a:b.gguf", LocalFile(Path("./a:b.gguf"))),
        ("hf:o/r/f.gguf", HubFile("o/r", "f.gguf", "main")),
        ("hf:o/r/sub/dir/f.gguf", HubFile("o/r", "sub/dir/f.gguf", "main")),
        ("hf:o/r/f.gguf@v1.0", HubFile("o/r", "f.gguf", "v1.0")),
        ("hf:o/r/f.gguf@refs/pr/1", HubFile("o/r", "f.gguf", "refs/pr/1")),
        ("hf:o/r", HubFile("o/r", None, "main")),
        ("hf:o/r@v1", HubFile("o/r", None, "v1")),
        ("pypi:a-b==1.0/x/y.gguf", Packaged((Member("a-b", "1.0", "x/y.gguf"),))),
        ("pypi:a==1/x.part1+b==1/x.part2", Packaged((Member("a", "1", "x.part1"), Member("b", "1", "x.part2")))),
        ("pypi:a==1/x+y.gguf", Packaged((Member("a", "1", "x+y.gguf"),))),
    ],
)
def test_each_form_means_its_value(text: str, value: Any) -> None:
    assert parse(text) == value


def test_a_path_object_is_a_path_whatever_it_looks_like() -> None:
    assert parse(Path("smollm2")) == LocalFile(Path("smollm2"))


def test_nothing_is_the_default_model_and_its_name_is_known() -> None:
    default = parse(None)
    assert default == parse("smollm2")
    assert isinstance(default, Packaged)
    assert name_for(default) == "smollm2"
    known = known_for(default)
    assert known is not None
    assert known.size_bytes == 98_362_432


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_name_stands_for_a_reference_with_a_hash(name: str) -> None:
    reference = parse(name)
    assert str(reference) == KNOWN[name].reference
    assert re.fullmatch(r"[0-9a-f]{64}", KNOWN[name].sha256)


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", "a\0b", "hf:", "hf:owner", "hf:owner/", "hf:/repo/f", "hf:o/../f", "hf:o/r/../f.gguf",
        "hf:o/r//f.gguf",
        "hf:o/r/f.gguf@", "hf:o/r/f.gguf@a..b", "hf:o/r/a\\b.gguf", "hf:o r/x/f.gguf", "pypi:", "pypi:a", "pypi:a==1",
        "pypi:a==1/", "pypi:a==1/../x", "pypi:a==1//x", "pypi:a>=1/x", "pypi:-a==1/x",
        "pypi:--index-url==1/x", "https://host/model.gguf", "ollama:x", "hff:o/r/f.gguf", "pypi:a==1/x\n",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_bad_option_in_one_line(text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_misspelt_kind_gets_a_suggestion() -> None:
    with pytest.raises(BadOption, match=r"unknown kind of model 'hff:'.*Did you mean 'hf'\?"):
        parse("hff:o/r/f.gguf")


def test_what_is_neither_text_nor_path_is_refused() -> None:
    with pytest.raises(BadOption, match="got 3"):
        parse(3)  # type: ignore[arg-type]


_words = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=30)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["hf:o/r/", "hf:", "pypi:a==1/", "pypi:"]), _words)
def test_no_reference_leads_out_of_the_store(start: str, rest: str) -> None:
    try:
        reference = parse(start + rest)
    except BadOption:
        return
    assert not isinstance(reference, LocalFile)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", folder_name(reference))
    assert parse(str(reference)) == reference
