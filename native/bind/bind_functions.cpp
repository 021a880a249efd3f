#include "../core/context.hpp"
#include "../core/gguf_check.hpp"
#include "../core/model.hpp"
#include "../core/runtime.hpp"
#include "../core/sampler.hpp"
#include "../core/schema.hpp"
#include "bind.hpp"

void bind_functions(nb::module_ &m) {
    nb::class_<kvasir::Device>(m, "Device", "A compute device that ggml can use.")
        .def_ro("name", &kvasir::Device::name)
        .def_ro("description", &kvasir::Device::description)
        .def_ro("kind", &kvasir::Device::kind, "'cpu', 'gpu', 'igpu' or 'accel'.")
        .def_ro("memory_free", &kvasir::Device::memory_free)
        .def_ro("memory_total", &kvasir::Device::memory_total);

    nb::class_<kvasir::GgufFacts>(m, "GgufFacts", "What a GGUF file says of itself, read without its tensors.")
        .def_ro("architecture", &kvasir::GgufFacts::architecture)
        .def_ro("name", &kvasir::GgufFacts::name)
        .def_ro("file_type", &kvasir::GgufFacts::file_type)
        .def_ro("n_tensors", &kvasir::GgufFacts::n_tensors)
        .def_ro("n_kv", &kvasir::GgufFacts::n_kv)
        .def_ro("context_length", &kvasir::GgufFacts::context_length)
        .def_ro("block_count", &kvasir::GgufFacts::block_count)
        .def_ro("embedding_length", &kvasir::GgufFacts::embedding_length)
        .def_ro("n_vocab", &kvasir::GgufFacts::n_vocab)
        .def_ro("size_bytes", &kvasir::GgufFacts::size_bytes);

    m.def("llama_version", [] { return std::string(llama_version()); }, "llama.cpp's version.");
    m.def(
        "build_info",
        [] {
            kvasir::ensure_backend();
            return std::map<std::string, std::string>{{"backend", KVASIR_BACKEND},
                                                      {"llama_cpp", KVASIR_LLAMA_VERSION " (" KVASIR_LLAMA_COMMIT ")"},
                                                      {"kernels", KVASIR_KERNELS},
                                                      {"compiler", KVASIR_COMPILER},
                                                      {"system_info", llama_print_system_info()}};
        },
        "How this extension was built, and which CPU features ggml uses. `kernels` names our own attention's sources.");
    m.def("devices", &kvasir::list_devices, "The compute devices this build sees.");
    m.def(
        "supports",
        [] {
            kvasir::ensure_backend();
            return std::map<std::string, bool>{{"mmap", llama_supports_mmap()},
                                               {"mlock", llama_supports_mlock()},
                                               {"gpu_offload", llama_supports_gpu_offload()},
                                               {"rpc", llama_supports_rpc()}};
        },
        "What this build can do.");
    m.def("check_gguf", &kvasir::check_gguf, "path"_a, Unlocked(),
          "Reads and checks a GGUF file's keys. Raises ModelNotFound or ModelLoadError.");
    m.def("json_schema_to_grammar", &kvasir::json_schema_to_gbnf, "schema_json"_a, Unlocked(),
          "A GBNF grammar for a JSON schema. Raises BadSchema.");
    m.def("take_logs", &kvasir::take_logs, "timeout_s"_a, Unlocked(),
          "llama.cpp's log lines since the last call, as (logging level, text). Waits up to timeout_s for the first.");
    m.attr("SAMPLER_NAMES") = nb::cast(kvasir::sampler_names());
    m.attr("KV_TYPES") = nb::cast(kvasir::kv_type_names());
}
