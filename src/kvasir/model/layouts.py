"""Layouts of weights: their names, how large they are, and which are slow on which CPU.

Pure: values in, values out. Owns the table of what was measured; where nothing was measured it claims nothing.
Converting is `conversion.py`'s and the store's to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

# Bits that a weight takes, from the block formats of ggml; the mixed ones (_s, _m, _l) as they come out on Llamas.
# The names are those that `native.quantize` takes.
LAYOUT_BITS: Mapping[str, float] = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q5_k_s": 5.6, "q5_1": 6.0,
    "q5_0": 5.5, "q4_k_m": 4.9, "q4_k_s": 4.7, "q4_1": 5.0, "q4_0": 4.5, "iq4_nl": 4.5, "iq4_xs": 4.3,
    "q3_k_l": 4.3, "q3_k_m": 3.9, "q3_k_s": 3.5, "q2_k": 3.4,
}  # fmt: skip

# What is taken for a file that does not say its layout, or an exotic one: most of those are not quantised at all.
UNKNOWN_BITS = 16.0


class SlowLayout(NamedTuple):
    """A layout without a fast kernel on some CPUs, and the one to use there instead.

    The CPU is known by the instructions that llama.cpp was built with. `prefill` and `decode` are how many times faster
    the better layout was measured to be at reading a prompt and at writing.
    """

    instructions: frozenset[str]
    layout: str
    better: str
    prefill: float
    decode: float


ARM, AMX = frozenset({"NEON", "DOTPROD"}), frozenset({"AMX_INT8"})

# docs/models.md has the figures. Q8_0 and not the slightly faster Q4_0, because it keeps what the others hold.
SLOW_LAYOUTS = (
    SlowLayout(ARM, "q4_1", "q8_0", prefill=3.7, decode=1.6),
    SlowLayout(AMX, "q5_1", "q8_0", prefill=5.2, decode=1.3),
    SlowLayout(AMX, "q5_0", "q8_0", prefill=2.6, decode=1.1),
)

# A gain in writing below this is not promised: a large model writes as fast as its bytes are read, and Q8_0 has more.
WORTH_TELLING = 1.5


def slow_layout(file_type: str, build_info: Mapping[str, str]) -> SlowLayout | None:
    """What is known of this layout's slowness on the CPU of this build; None where it is fast or nothing is known.

    `file_type` is llama.cpp's name ("Q4_1", "Q4_K - Medium"), `build_info` is `native.build_info()`. A build for a GPU
    has no slow layouts: the weights are read there by other kernels.
    """
    if build_info.get("backend") != "cpu":
        return None
    layout, instructions = layout_of(file_type), _instructions(build_info.get("system_info", ""))
    matching = (slow for slow in SLOW_LAYOUTS if slow.layout == layout and slow.instructions <= instructions)
    return next(matching, None)


def slow_layout_hint(file_type: str, build_info: Mapping[str, str], *, ref: str = "REF") -> str | None:
    """One sentence that says a layout is slow here, with the command that helps; None where it is not slow."""
    slow = slow_layout(file_type, build_info)
    if slow is None:
        return None
    writes = f" and writes {slow.decode:g}" if slow.decode >= WORTH_TELLING else ""
    return (
        f"{slow.layout.upper()} weights have no fast kernel on this CPU; {slow.better.upper()} reads prompts about"
        f" {slow.prefill:g}{writes} times as fast: kvasir models convert {ref} --to {slow.better}"
    )


def layout_of(file_type: str) -> str:
    """The layout's name from llama.cpp's name of a file type: "Q4_K - Medium" is q4_k_m, "IQ4_NL - 4.5 bpw" iq4_nl."""
    name, _, size = file_type.removeprefix("(guessed) ").removeprefix("all ").lower().partition(" - ")
    named = name + {"small": "_s", "medium": "_m", "large": "_l"}.get(size, "")
    return "q2_k" if named == "q2_k_m" else named


def converted_bytes(n_bytes: int, file_type: str, to: str) -> int:
    """About how large a model becomes in another layout."""
    return int(n_bytes * LAYOUT_BITS[to] / LAYOUT_BITS.get(layout_of(file_type), UNKNOWN_BITS))


def _instructions(system_info: str) -> frozenset[str]:
    """The names that llama.cpp's "CPU : NEON = 1 | DOTPROD = 1 | " switches on."""
    return frozenset(re.findall(r"(\w+) = 1", system_info))
