"""llama.cpp, compiled in: models, vocabularies, contexts, memory, samplers and chat templates.

Re-exports the extension `_native`; `kvasir.native.fake` has the same names and needs no compiler. docs/native.md writes
a decode loop with them by hand. Most programs want `kvasir.load()` instead.
"""

try:
    from kvasir.native._native import (
        KV_TYPES,
        SAMPLER_NAMES,
        Adapter,
        ChatDelta,
        ChatParser,
        ChatPrompt,
        ChatTemplate,
        Context,
        Device,
        GgufFacts,
        Memory,
        Model,
        Row,
        Sampler,
        SamplerParams,
        Step,
        TokenLogprobs,
        Vocab,
        build_info,
        check_gguf,
        devices,
        json_schema_to_grammar,
        llama_version,
        quantize,
        supports,
        take_logs,
    )
except ModuleNotFoundError as missing:
    if missing.name != "kvasir.native._native":
        raise

    def __getattr__(name: str) -> object:
        """Name what is missing only when it is used, so that the fake can be imported without a compiler."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"kvasir.native.{name} needs the compiled extension, which is missing. In a clone run `make build`; "
            "elsewhere `pip install kvasir-llm`."
        )


__all__ = [
    "KV_TYPES",
    "SAMPLER_NAMES",
    "Adapter",
    "ChatDelta",
    "ChatParser",
    "ChatPrompt",
    "ChatTemplate",
    "Context",
    "Device",
    "GgufFacts",
    "Memory",
    "Model",
    "Row",
    "Sampler",
    "SamplerParams",
    "Step",
    "TokenLogprobs",
    "Vocab",
    "build_info",
    "check_gguf",
    "devices",
    "json_schema_to_grammar",
    "llama_version",
    "quantize",
    "supports",
    "take_logs",
]
