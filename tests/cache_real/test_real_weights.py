"""Real weights: SmolLM2, and gemma-3-270m past its window of 512 tokens. Under `make test-models`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cache_real.rig import Place
from tests.engine_real.noise import check_bits
from tests.engine_real.rig import Taken
from tests.engine_real.subject import Subject
from tests.models_e2e.fetch import file_of
from tests.models_e2e.table import MODELS, chosen

pytestmark = pytest.mark.models

LAYOUTS = ("unified", "split")
DEFAULTS: dict[str, Any] = {
    "block_tokens": 256, "min_tokens": 32, "cold_min_tokens": 32, "continued_interval": 256,
    "boundary_trim_tokens": 32, "boundary_align_tokens": 256,
}  # fmt: skip


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma-3-270m"])
def subject(request: pytest.FixtureRequest) -> Subject:
    (found,) = [model for model in MODELS if model.name == request.param]
    if found not in chosen():
        pytest.skip(f"KVASIR_TEST_MODEL names another model than {found}")
    return Subject("real", file_of(found))


def uninterrupted(
    place: Place, path: Path, tokens: tuple[int, ...], more: tuple[int, ...], **options: Any
) -> list[Taken]:
    """Two turns in one engine: the second continues what is still in memory."""
    with place.opened(path, **options) as each:
        said = each.ask(tokens)
        turns = [said, each.ask((*tokens, *said.tokens, *more))]
        assert each.rig.counters.shared_parked == 1
        assert each.rig.counters.restored == 0
    return turns


@pytest.mark.parametrize(("threads", "type_v"), [(2, "bf16"), (1, "f16")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_from_disk_equals_uninterrupted(
    tmp_path: Path, subject: Subject, layout: str, threads: int, type_v: str
) -> None:
    """700 tokens, which is past gemma's window; the second turn in a fresh engine, to the last bit.

    With V in BF16 in the other layout too, with another context size and more slots.
    """
    options = DEFAULTS | {
        "layout": layout, "slots": 1, "context_size": 1024, "threads": threads, "type_v": type_v,
    }  # fmt: skip
    tokens, more = subject.prompt(700, salt=2), subject.prompt(20, salt=3)
    said, wanted = uninterrupted(Place(tmp_path / "one"), subject.path, tokens, more, **options)
    place = Place(tmp_path / "two")
    with place.opened(subject.path, **options) as first:
        check_bits(first.ask(tokens), said)
    other = dict(options, layout=LAYOUTS[layout == "unified"], context_size=2048, slots=2)
    for settings in (options, other) if type_v == "bf16" else (options,):
        copy = Place(tmp_path / f"in {settings['layout']}")  # each finds what the first turn left, and no more
        shutil.copytree(place.folder, copy.folder)
        with copy.opened(subject.path, **settings) as second:
            again = second.ask((*tokens, *said.tokens, *more))
            assert second.rig.counters.restored == 1
        assert again.done.usage.cached_tokens == len(tokens) + len(said.tokens) - 1
        check_bits(again, wanted)
