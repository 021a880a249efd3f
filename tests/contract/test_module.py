"""What the module itself promises: names, facts about the build, logs, schemas."""

from __future__ import annotations

import json

import pytest

from kvasir import errors
from tests.contract.core import Core

NAMES = {
    "KV_TYPES", "SAMPLER_NAMES", "Adapter", "ChatDelta", "ChatParser", "ChatPrompt", "ChatTemplate", "Context",
    "Device", "GgufFacts", "Memory", "Model", "Row", "Sampler", "SamplerParams", "Step", "TokenLogprobs", "Vocab",
    "build_info", "check_gguf", "devices", "json_schema_to_grammar", "llama_version", "quantize", "supports",
    "take_logs",
}  # fmt: skip


def test_both_cores_have_every_name(core: Core) -> None:
    assert set(dir(core.native)) >= NAMES


def test_the_sampler_names_are_those_of_llama_cpp(core: Core) -> None:
    assert list(core.native.SAMPLER_NAMES) == [
        "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "infill",
        "logit_bias", "mirostat", "mirostat_v2", "adaptive_p",
    ]  # fmt: skip


def test_the_kv_types_are_those_of_llama_cpp(core: Core) -> None:
    known = {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"}
    assert set(core.native.KV_TYPES) == known


def test_the_build_says_what_it_is(core: Core) -> None:
    assert set(core.native.build_info()) == {"backend", "llama_cpp", "kernels", "compiler", "system_info"}
    assert core.native.llama_version()
    assert set(core.native.supports()) == {"mmap", "mlock", "gpu_offload", "rpc"}


def test_there_is_a_device_and_it_has_memory(core: Core) -> None:
    device = core.native.devices()[0]
    assert device.name
    assert isinstance(device.description, str)
    assert device.kind in ("cpu", "gpu", "igpu", "accel")
    assert 0 <= device.memory_free <= device.memory_total


def test_a_file_tells_its_facts_without_being_loaded(core: Core) -> None:
    facts = core.native.check_gguf(core.paths["plain"])
    model = core.native.Model.load(core.paths["plain"])  # a context with YaRN changes what a model says of itself
    assert facts.architecture == model.architecture
    assert facts.n_vocab == model.vocab.n_tokens
    assert facts.context_length == model.n_ctx_train
    assert facts.embedding_length == model.n_embd
    assert facts.block_count == model.n_layer
    assert facts.size_bytes > 0
    assert facts.n_tensors >= 0
    assert facts.n_kv >= 0
    assert isinstance(facts.name, str)
    assert isinstance(facts.file_type, str)


def test_a_path_that_is_no_model_has_no_facts(core: Core) -> None:
    with pytest.raises((errors.ModelLoadError, errors.ModelNotFound)):
        core.native.check_gguf("no such thing")


def test_loading_a_model_is_logged(core: Core) -> None:
    while core.native.take_logs(0.0):
        pass
    core.native.Model.load(core.paths["plain"])
    lines = core.native.take_logs(2.0)
    assert lines
    assert all(isinstance(level, int) and isinstance(line, str) for level, line in lines)


def test_waiting_for_logs_that_do_not_come_ends_in_time(core: Core) -> None:
    while core.native.take_logs(0.0):
        pass
    assert core.native.take_logs(0.05) == []


def test_a_schema_becomes_a_grammar_a_sampler_takes(core: Core) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = core.native.json_schema_to_grammar(json.dumps(schema))
    assert "grammar" in core.sampler(grammar=grammar).names


@pytest.mark.parametrize("schema", ["", "{", "[]", '"text"', '{"type": "no such type"}'])
def test_a_broken_schema_is_refused(core: Core, schema: str) -> None:
    with pytest.raises(errors.BadSchema):
        core.native.json_schema_to_grammar(schema)
