"""Which layouts are slow where: a rule on values alone."""

from __future__ import annotations

import pytest

from kvasir.model.layouts import LAYOUT_BITS, SLOW_LAYOUTS, converted_bytes, layout_of, slow_layout, slow_layout_hint

ARM = {"backend": "cpu", "system_info": "CPU : NEON = 1 | ARM_FMA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | REPACK = 1 | "}
OLD_ARM = {"backend": "cpu", "system_info": "CPU : NEON = 1 | ARM_FMA = 1 | DOTPROD = 0 | "}
AMX = {"backend": "cpu", "system_info": "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | "}
AVX2 = {"backend": "cpu", "system_info": "CPU : SSE3 = 1 | AVX2 = 1 | REPACK = 1 | "}


def test_q4_1_is_slow_on_arm_and_the_hint_names_the_command() -> None:
    hint = slow_layout_hint("Q4_1", ARM, ref="smollm2")
    assert hint is not None
    assert "\n" not in hint
    assert hint.endswith("kvasir models convert smollm2 --to q8_0")


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "all F32", "F16", "Q4_K - Medium", "", "no such type"])
def test_other_layouts_are_not_complained_of_on_arm(file_type: str) -> None:
    assert slow_layout_hint(file_type, ARM) is None


@pytest.mark.parametrize(
    "build", [AMX, AVX2, OLD_ARM, {}, {"backend": "cpu"}, {"backend": "cpu", "system_info": "none"}]
)
def test_nothing_is_claimed_where_nothing_slow_was_measured(build: dict[str, str]) -> None:
    assert slow_layout("Q4_1", build) is None


@pytest.mark.parametrize("file_type", ["Q5_0", "Q5_1"])
def test_q5_is_slow_on_amx_and_only_reading_is_promised(file_type: str) -> None:
    hint = slow_layout_hint(file_type, AMX)
    assert hint is not None
    assert "writes" not in hint
    assert slow_layout_hint(file_type, AVX2) is None


def test_a_gpu_has_kernels_of_its_own() -> None:
    assert slow_layout("Q4_1", ARM | {"backend": "metal"}) is None


def test_a_type_that_llama_cpp_guessed_counts_too() -> None:
    assert slow_layout("(guessed) Q4_1", ARM) is not None


def test_what_is_better_can_be_converted_to_and_is_not_slow_itself() -> None:
    for slow in SLOW_LAYOUTS:
        assert slow.better in LAYOUT_BITS
        assert not any(slow.better == each.layout for each in SLOW_LAYOUTS if each.instructions <= slow.instructions)
        assert min(slow.prefill, slow.decode) > 1.0


@pytest.mark.parametrize(
    ("file_type", "layout"),
    [
        ("Q4_1", "q4_1"),
        ("all F32", "f32"),
        ("Q4_K - Medium", "q4_k_m"),
        ("Q5_K - Small", "q5_k_s"),
        ("Q3_K - Large", "q3_k_l"),
        ("Q2_K - Medium", "q2_k"),
        ("IQ4_NL - 4.5 bpw", "iq4_nl"),
        ("", ""),
    ],
)
def test_llama_cpps_names_become_ours(file_type: str, layout: str) -> None:
    assert layout_of(file_type) == layout


def test_the_size_of_a_converted_model_is_about_right() -> None:
    # The default model as Q8_0, measured: 144.8 MB.
    assert converted_bytes(98_362_432, "Q4_1", "q8_0") == pytest.approx(144_811_072, rel=0.2)
    assert converted_bytes(1000, "a type of tomorrow", "f16") == 1000
