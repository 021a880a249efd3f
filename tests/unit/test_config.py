"""Settings: who beats whom, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.config import LOAD_OPTIONS, LoadSettings, load_settings, sampling_defaults, store_settings
from kvasir.errors import BadOption


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(environ: dict[str, str] | None = None, /, **options: Any) -> LoadSettings:
    return load_settings(options, environ=environ or {})


def toml(text: str, name: str = "kvasir.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_the_defaults_are_the_documented_ones() -> None:
    s = load()
    assert (s.gpu_layers, s.split_mode, s.context_size, s.batch, s.ubatch) == (None, "layer", None, 512, 512)
    assert (s.use_mmap, s.use_mlock, s.vocab_only, s.flash_attn) == (True, False, False, "auto")
    assert (s.slots, s.layout, s.strategy, s.chunk_tokens, s.prefill_budget, s.max_queue) == (
        4,
        "auto",
        "decode_maximal",
        512,
        128,
        64,
    )


def test_arguments_beat_environment_beats_the_file_beats_defaults() -> None:
    toml("[load]\ncontext_size = 100\nbatch = 100\nslots = 3\n")
    s = load({"KVASIR_CONTEXT_SIZE": "200", "KVASIR_BATCH": "200"}, context_size=300)
    assert (s.context_size, s.batch, s.slots, s.max_queue) == (300, 200, 3, 64)


def test_ggml_n_gpu_layers_beats_even_the_argument() -> None:
    assert load({"GGML_N_GPU_LAYERS": "7", "KVASIR_GPU_LAYERS": "8"}, gpu_layers=9).gpu_layers == 7
    assert load({"KVASIR_GPU_LAYERS": "8"}, gpu_layers=9).gpu_layers == 9
    assert load({"GGML_N_GPU_LAYERS": ""}, gpu_layers=9).gpu_layers == 9
    with pytest.raises(BadOption, match="got 'many' from GGML_N_GPU_LAYERS"):
        load({"GGML_N_GPU_LAYERS": "many"})


@pytest.mark.parametrize("everything", [None, -1])
def test_none_and_minus_one_are_all_layers(everything: int | None) -> None:
    assert load(gpu_layers=everything).gpu_layers is None


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "layer"),
        ({"split_mode": "none"}, "none"),
        ({"tp": 2}, "row"),
        ({"tensor_parallel": 2, "split_mode": "layer"}, "row"),
        ({"tp": 2, "pp": 2}, "row"),
        ({"pp": 2}, "layer"),
        ({"pp": 2, "split_mode": "none"}, "layer"),
        ({"tp": 1, "split_mode": "row"}, "row"),
    ],
)
def test_tensor_parallel_is_row_split_and_wins(options: dict[str, Any], mode: str) -> None:
    assert load(**options).split_mode == mode


def test_a_short_name_means_its_long_one_but_not_beside_it() -> None:
    assert load(pp=3).pipeline_parallel == 3
    with pytest.raises(BadOption, match="pipeline_parallel was given twice"):
        load(pp=3, pipeline_parallel=2)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("context_sizes", "Did you mean 'context_size'?"),
        ("n_ctx", "Did you mean 'context_size'?"),
        ("n_gpu_layers", "Did you mean 'gpu_layers'?"),
        ("temperature", "It is a sampling option."),
        ("qqqqqq", "unknown option 'qqqqqq'."),
    ],
)
def test_unknown_names_are_refused_with_a_hint(name: str, sentence: str) -> None:
    with pytest.raises(BadOption) as caught:
        load(**{name: 1})
    assert str(caught.value).endswith(sentence)


def test_unknown_names_in_the_file_are_refused_too() -> None:
    path = toml("[load]\ncontext_sise = 1\n")
    with pytest.raises(BadOption, match=r"unknown option 'context_sise' in kvasir.toml \[load\]\. Did you mean"):
        load()
    path.write_text("[laod]\nbatch = 1\n")
    with pytest.raises(BadOption, match=r"unknown table 'laod' in kvasir.toml\. Did you mean 'load'\?"):
        load()
    path.write_text("load = 3\n")
    with pytest.raises(BadOption, match=r"must be a table, as in \[load\]"):
        load()


def test_a_variable_that_is_nearly_ours_is_refused_and_strangers_pass() -> None:
    with pytest.raises(BadOption, match=r"KVASIR_CONTEXT_SISE\. Did you mean KVASIR_CONTEXT_SIZE\?"):
        load({"KVASIR_CONTEXT_SISE": "1"})
    load({"KVASIR_BACKEND": "cpu", "KVASIR_CMAKE_ARGS": "x", "KVASIR_LLAMA_CPP_DIR": "y", "KVASIR_TEST_MODEL": "z"})


BAD = [
    ("gpu_layers", -2),
    ("gpu_layers", "all"),
    ("split_mode", "rows"),
    ("main_gpu", -1),
    ("tensor_split", [-1.0]),
    ("tensor_split", "1,2"),
    ("pipeline_parallel", 0),
    ("tensor_parallel", -1),
    ("use_mmap", 1),
    ("context_size", 0),
    ("context_size", -1),
    ("context_size", 2**31),
    ("context_size", 10**30),
    ("context_size", "4096"),
    ("context_size", 1.5),
    ("context_size", True),
    ("batch", 0),
    ("batch", None),
    ("batch", 3),  # fewer than the four slots
    ("ubatch", 1024),  # more than the batch
    ("threads", 0),
    ("threads", 10_000),
    ("flash_attn", "maybe"),
    ("flash_attn", 2),
    ("type_k", "q2_0"),
    ("adapters", 3),
    ("adapters", [("a", "b", "c")]),
    ("adapters", [("a", "strong")]),
    ("adapters", [{"file": "x"}]),
    ("adapters", [""]),
    ("rope_scaling", "wild"),
    ("rope_freq_base", -1.0),
    ("rope_freq_base", float("nan")),
    ("rope_freq_scale", float("inf")),
    ("yarn_orig_ctx", -1),
    ("devices", [""]),
    ("model_dir", 3),
    ("model_dir", ""),
    ("slots", 0),
    ("slots", 257),
    ("layout", "both"),
    ("strategy", "fastest"),
    ("strategy", object()),
    ("max_queue", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(BadOption) as caught:
        load(**{name: value})
    assert str(caught.value).startswith(f"{name} must be ")
    assert "\n" not in str(caught.value)


def test_the_error_says_what_was_wanted_what_came_and_from_where() -> None:
    with pytest.raises(BadOption, match=r"^context_size must be a whole number, 1 or more .*, or None, got -5\.$"):
        load(context_size=-5)
    with pytest.raises(BadOption, match=r"got 'big' from KVASIR_CONTEXT_SIZE\.$"):
        load({"KVASIR_CONTEXT_SIZE": "big"})
    with pytest.raises(BadOption, match=r"Did you mean 'balanced'\?"):
        load(strategy="balance")
    toml('[load]\nslots = "four"\n')
    with pytest.raises(BadOption, match=r"^slots must be .* got 'four' from kvasir.toml \[load\]\.$"):
        load()


def test_a_smaller_batch_takes_its_ubatch_along() -> None:
    assert load(batch=64).ubatch == 64
    assert load(batch=1024).ubatch == 512


@pytest.mark.parametrize(
    ("given_value", "kept"), [(True, "on"), (False, "off"), ("auto", "auto"), ("on", "on"), ("off", "off")]
)
def test_flash_attention_takes_words_and_flags(given_value: Any, kept: str) -> None:
    assert load(flash_attn=given_value).flash_attn == kept


def test_adapters_are_paths_with_scales() -> None:
    s = load(adapters=["a.gguf", ("b.gguf", 0.5), Path("c.gguf"), {"path": "d.gguf", "scale": 2}])
    assert [(str(a.path), a.scale) for a in s.adapters] == [
        ("a.gguf", 1.0),
        ("b.gguf", 0.5),
        ("c.gguf", 1.0),
        ("d.gguf", 2.0),
    ]
    assert load(adapters="one.gguf").adapters[0].path == Path("one.gguf")


def test_every_kind_of_option_can_stand_in_the_environment() -> None:
    s = load(
        {
            "KVASIR_USE_MMAP": "off",
            "KVASIR_TENSOR_SPLIT": "3, 1",
            "KVASIR_DEVICES": "CUDA0,CUDA1",
            "KVASIR_FLASH_ATTN": "1",
            "KVASIR_THREADS": "none",
            "KVASIR_ROPE_FREQ_BASE": "1e6",
            "KVASIR_MODEL_DIR": "~/models",
            "KVASIR_ADAPTERS": "a.gguf,b.gguf=0.5",
            "KVASIR_STRATEGY": "balanced",
        }
    )
    assert (s.use_mmap, s.tensor_split, s.devices) == (False, (3.0, 1.0), ("CUDA0", "CUDA1"))
    assert (s.flash_attn, s.threads, s.rope_freq_base, s.strategy) == ("on", None, 1e6, "balanced")
    assert s.model_dir == Path("~/models").expanduser()
    assert [(str(a.path), a.scale) for a in s.adapters] == [("a.gguf", 1.0), ("b.gguf", 0.5)]


def test_a_strategy_may_be_any_object_that_plans() -> None:
    class Mine:
        def plan(self, view: Any, budget: Any) -> Any: ...

    mine = Mine()
    assert load(strategy=mine).strategy is mine


def test_memory_pressure_is_told_by_a_name_or_a_function() -> None:
    def sample() -> tuple[int, int]:
        return 1, 2

    assert load(cache_pressure=sample).cache_pressure is sample
    assert load({"KVASIR_CACHE_PRESSURE": "psutil"}).cache_pressure == "psutil"
    for bad in ("callback", None, 0.8):
        with pytest.raises(BadOption, match=r"^cache_pressure must be one of 'none', 'psutil', 'nvml', or a function"):
            load(cache_pressure=bad)


def test_the_marks_of_pressure_are_shares_in_order() -> None:
    s = load({"KVASIR_CACHE_PRESSURE_HIGH": "0.9"}, cache_pressure_low=0.9)
    assert (s.cache_pressure_high, s.cache_pressure_low) == (0.9, 0.9)
    assert load(cache_pressure_high=0.5).cache_pressure_low == 0.5
    assert (load().cache_pressure_high, load().cache_pressure_low) == (0.85, 0.75)
    with pytest.raises(
        BadOption, match=r"^cache_pressure_low must be at most cache_pressure_high \(0.85\), got 0.9\.$"
    ):
        load(cache_pressure_low=0.9)
    for name in ("cache_pressure_high", "cache_pressure_low"):
        for bad in (0, -0.1, 1.01, float("nan"), "half", True):
            with pytest.raises(BadOption, match=rf"^{name} must be a number above 0, at most 1, got "):
                load(**{name: bad})


def test_an_observer_is_a_function_and_cannot_stand_in_the_environment_or_a_file() -> None:
    assert load(observe=print).observe is print
    assert load(observe=None).observe is None
    with pytest.raises(BadOption, match="observe must be a function that takes one event, or None, got 'print'"):
        load({"KVASIR_OBSERVE": "print"})
    toml('[load]\nobserve = "print"\n')
    with pytest.raises(BadOption, match="observe must be a function"):
        load()


def test_kvasir_config_names_the_file() -> None:
    toml("[load]\nslots = 9\n", "other.toml")
    assert load({"KVASIR_CONFIG": "other.toml"}).slots == 9
    with pytest.raises(BadOption, match=r"KVASIR_CONFIG must name a TOML file, got 'gone.toml'"):
        load({"KVASIR_CONFIG": "gone.toml"})


def test_a_broken_file_is_one_sentence() -> None:
    path = toml("[load\n")
    with pytest.raises(BadOption, match=r"^kvasir.toml is not valid TOML: "):
        load()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadOption, match=r"^kvasir.toml is not valid TOML: "):
        load()


def test_every_load_option_can_stand_in_the_file() -> None:
    lines = {
        "gpu_layers": "-1", "split_mode": '"row"', "main_gpu": "1", "tensor_split": "[3, 1]", "pipeline_parallel": "1",
        "tensor_parallel": "2", "devices": '["CUDA0"]', "use_mmap": "false", "use_mlock": "true", "vocab_only": "false",
        "check_tensors": "true", "model_dir": '"models"', "adapters": '["a.gguf", {path = "b", scale = 0.5}]',
        "context_size": "2048", "batch": "256", "ubatch": "128", "threads": "2", "threads_batch": "2",
        "flash_attn": "true", "type_k": '"q8_0"', "type_v": '"q8_0"', "swa_full": "false", "offload_kqv": "true",
        "op_offload": "true", "rope_scaling": '"yarn"', "rope_freq_base": "10000", "rope_freq_scale": "0.5",
        "yarn_ext_factor": "1", "yarn_attn_factor": "1.0", "yarn_beta_fast": "32", "yarn_beta_slow": "1",
        "yarn_orig_ctx": "4096", "slots": "8", "layout": '"split"', "strategy": '"balanced"', "chunk_tokens": "256",
        "prefill_budget": "64", "max_queue": "8", "cache": "false", "cache_dir": '"kv"', "cache_ram_bytes": "1000",
        "cache_tmpfs_dir": '"shm"', "cache_tmpfs_bytes": "0", "cache_disk_bytes": "5000", "cache_pressure": '"psutil"',
        "cache_tiers": '["ram"]', "cache_pressure_high": "0.9", "cache_pressure_low": "0.5",
        "fingerprint_mode": '"chunked"', "block_tokens": "128", "min_tokens": "1", "cold_min_tokens": "2",
        "cold_max_tokens": "3", "continued_interval": "4", "boundary_trim_tokens": "5", "boundary_align_tokens": "6",
        "session_resume_wait_ms": "7",
    }  # fmt: skip
    assert set(lines) == set(LOAD_OPTIONS) - {"observe"}  # a function
    toml("[load]\n" + "\n".join(f"{name} = {value}" for name, value in lines.items()))
    s = load()
    assert (s.split_mode, s.type_k, s.yarn_beta_fast, s.layout, s.max_queue) == ("row", "q8_0", 32.0, "split", 8)


def test_sampling_defaults_come_from_the_environment_and_the_file() -> None:
    toml('[sampling]\ntemperature = 0\nstop = ["x"]\nlogit_bias = {42 = -1.5}\n')
    s = sampling_defaults(
        environ={
            "KVASIR_MAX_TOKENS": "7",
            "KVASIR_SAMPLERS": "top_k,temperature",
            "KVASIR_IGNORE_EOS": "true",
            "KVASIR_JSON_SCHEMA": '{"type": "object"}',
        }
    )
    assert (s.temperature, s.stop, s.logit_bias, s.max_tokens) == (0.0, ("x",), {42: -1.5}, 7)
    assert (s.samplers, s.ignore_eos, s.json_schema) == (("top_k", "temperature"), True, {"type": "object"})
    assert sampling_defaults({"max_tokens": 9}, environ={"KVASIR_MAX_TOKENS": "7"}).max_tokens == 9


def test_a_bad_sampling_default_says_where_it_stands() -> None:
    with pytest.raises(BadOption, match=r"^KVASIR_TOP_P: top_p must be a number from 0 to 1, got 7\.0\.$"):
        sampling_defaults(environ={"KVASIR_TOP_P": "7"})
    toml("[sampling]\ntempratur = 1\n")
    with pytest.raises(BadOption, match=r"unknown option 'tempratur' in kvasir.toml \[sampling\]"):
        sampling_defaults(environ={})


def test_the_store_is_in_kvasir_home_or_the_cache_folder() -> None:
    assert store_settings(environ={"KVASIR_HOME": "/a/b"}).home == Path("/a/b")
    assert store_settings(environ={"XDG_CACHE_HOME": "/c"}).home == Path("/c/kvasir")
    assert store_settings(environ={}).home == Path("~/.cache/kvasir").expanduser()
    assert store_settings(environ={"KVASIR_HOME": "rel"}).home == Path.cwd() / "rel"
    toml('[store]\nhome = "~/elsewhere"\noffline = true\n')
    assert store_settings(environ={}).home == Path("~/elsewhere").expanduser()


def test_offline_is_a_flag() -> None:
    assert store_settings(environ={"KVASIR_OFFLINE": "1"}).offline is True
    assert store_settings(environ={"KVASIR_OFFLINE": "0"}).offline is False
    with pytest.raises(BadOption, match="offline must be True or False, got 'perhaps' from KVASIR_OFFLINE"):
        store_settings(environ={"KVASIR_OFFLINE": "perhaps"})


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        load().slots = 3  # type: ignore[misc]


_junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.text(max_size=2))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(LOAD_OPTIONS), _junk, max_size=4))
def test_any_options_make_settings_or_a_bad_option(options: dict[str, Any]) -> None:
    try:
        load(**options)
    except BadOption as error:
        assert str(error)  # noqa: PT017
