"""A restore of tens of thousands of tokens beside a stream: so many tokens a tick and no more."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kvasir.engine.warm import IMPORT_TOKENS
from tests.cache_real.rig import Place
from tests.models import write_model
from tests.unit.engine.rig import imported_per_tick, prompt

N_TOKENS = 30_000
CONTEXT = 1 << 15


@pytest.fixture(params=["llama", "gemma3", "lfm2"])
def long_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model of each kind of memory that rows are imported into, with 32,768 tokens of context."""

    def lengthen(keys: gguf.GGUFWriter) -> None:
        del keys.kv_data[0][f"{request.param}.context_length"]
        keys.add_context_length(CONTEXT)

    return write_model(request.param, tmp_path / "long.gguf", edit=lengthen)


@pytest.mark.long
@pytest.mark.timeout(1800)  # most of it is computing the prefix once
def test_a_stream_goes_on_while_a_long_prefix_is_imported(long_path: Path, place: Place) -> None:
    tokens = prompt(N_TOKENS, salt=2)
    options = {"context_size": 2 * CONTEXT, "slots": 2, "layout": "split", "block_tokens": 256, "type_v": "bf16"}
    with place.opened(long_path, **options) as first:
        wanted = first.ask(tokens)
    with place.opened(long_path, **options) as second:
        rig = second.rig
        stream = rig.submit(prompt(20, salt=5), max_tokens=2000, cache=False)
        while not stream.tokens:
            rig.tick()
        late = rig.submit(tokens, max_tokens=6)
        imported = imported_per_tick(rig, stream, [late])
    assert max(imported) <= IMPORT_TOKENS
    assert sum(imported) >= N_TOKENS // 256 * 256
    assert sum(n > 0 for n in imported) >= N_TOKENS // IMPORT_TOKENS
    assert late.done.usage.cached_tokens >= N_TOKENS // 256 * 256
    assert late.tokens == wanted.tokens
