#include <cstring>

#include "../core/context.hpp"

#include "../core/memory.hpp"
#include "bind.hpp"

using kvasir::Adapter;
using kvasir::Context;
using kvasir::ContextParams;
using kvasir::Model;
using kvasir::Row;
using kvasir::Sampler;
using kvasir::Step;
using kvasir::TokenLogprobs;

namespace {

using AdapterScales = std::vector<std::pair<const Adapter *, float>>;

kvasir::Adapters handles(const AdapterScales &adapters) {
    kvasir::Adapters out;
    for (const auto &[adapter, scale] : adapters) {
        out.emplace_back(adapter->handle(), scale);
    }
    return out;
}

std::shared_ptr<Context> make_context(const Model &model, int64_t n_ctx, int64_t n_batch, int64_t n_ubatch,
                                      int64_t n_seq_max, int32_t threads, int32_t threads_batch, int32_t sample_threads,
                                      int32_t poll, bool kv_unified, const std::string &flash_attn,
                                      const std::string &type_k, const std::string &type_v, bool swa_full,
                                      bool offload_kqv, bool op_offload, bool embeddings, const std::string &pooling,
                                      const std::string &attention, const std::string &rope_scaling,
                                      float rope_freq_base, float rope_freq_scale, float yarn_ext_factor,
                                      float yarn_attn_factor, float yarn_beta_fast, float yarn_beta_slow,
                                      int64_t yarn_orig_ctx, const AdapterScales &adapters) {
    ContextParams p;
    p.n_ctx = n_ctx;
    p.n_batch = n_batch;
    p.n_ubatch = n_ubatch;
    p.n_seq_max = n_seq_max;
    p.threads = threads;
    p.threads_batch = threads_batch;
    p.sample_threads = sample_threads;
    p.poll = poll;
    p.kv_unified = kv_unified;
    p.flash_attn = flash_attn;
    p.type_k = type_k;
    p.type_v = type_v;
    p.swa_full = swa_full;
    p.offload_kqv = offload_kqv;
    p.op_offload = op_offload;
    p.embeddings = embeddings;
    p.pooling = pooling;
    p.attention = attention;
    p.rope_scaling = rope_scaling;
    p.rope_freq_base = rope_freq_base;
    p.rope_freq_scale = rope_freq_scale;
    p.yarn_ext_factor = yarn_ext_factor;
    p.yarn_attn_factor = yarn_attn_factor;
    p.yarn_beta_fast = yarn_beta_fast;
    p.yarn_beta_slow = yarn_beta_slow;
    p.yarn_orig_ctx = yarn_orig_ctx;
    const kvasir::Adapters loras = handles(adapters);
    const nb::gil_scoped_release unlocked;
    return std::make_shared<Context>(model, p, loras);
}

}  // namespace

void bind_context(nb::module_ &m) {
    nb::class_<Row>(m, "Row", "One sequence's part of a step: tokens at consecutive positions.")
        .def(nb::init<int32_t, int32_t, std::vector<int32_t>, std::shared_ptr<Sampler>, std::optional<int32_t>, bool>(),
             "seq"_a, "pos"_a, "tokens"_a, "sampler"_a = nb::none(), "logprobs"_a = nb::none(), "output"_a = false,
             "sampler: sample after the last token. logprobs: how many alternatives to report. output: keep the logits "
             "without a sampler.")
        .def_ro("seq", &Row::seq)
        .def_ro("pos", &Row::pos)
        .def_ro("tokens", &Row::tokens);

    nb::class_<TokenLogprobs>(
        m, "TokenLogprobs",
        "Log probabilities of a sampled token and of the likeliest alternatives, before any sampler.")
        .def_ro("logprob", &TokenLogprobs::logprob)
        .def_ro("top", &TokenLogprobs::top);

    nb::class_<Step>(m, "Step", "What one step did. Lists have one entry per row.")
        .def_ro("status", &Step::status, "'ok', 'no_room', 'aborted', 'bad_batch' or 'failed'.")
        .def_ro("tokens", &Step::tokens)
        .def_ro("logprobs", &Step::logprobs)
        .def_ro("errors", &Step::errors, "Why a row could not be sampled, or None.")
        .def_ro("decode_s", &Step::decode_s)
        .def_ro("sample_s", &Step::sample_s);

    nb::class_<Context>(m, "Context",
                        "A model at work: KV memory for some sequences, and one decode a step. Keeps its model alive.")
        .def(nb::new_(&make_context), "model"_a, nb::kw_only(), "n_ctx"_a = 0, "n_batch"_a = 512, "n_ubatch"_a = 512,
             "n_seq_max"_a = 1, "threads"_a = 0, "threads_batch"_a = 0, "sample_threads"_a = 0, "poll"_a = 50,
             "kv_unified"_a = true, "flash_attn"_a = "auto", "type_k"_a = "f16", "type_v"_a = "f16",
             "swa_full"_a = true, "offload_kqv"_a = true, "op_offload"_a = true, "embeddings"_a = false,
             "pooling"_a = "model", "attention"_a = "model", "rope_scaling"_a = "model", "rope_freq_base"_a = 0.0f,
             "rope_freq_scale"_a = 0.0f, "yarn_ext_factor"_a = -1.0f, "yarn_attn_factor"_a = -1.0f,
             "yarn_beta_fast"_a = -1.0f, "yarn_beta_slow"_a = -1.0f, "yarn_orig_ctx"_a = 0,
             "adapters"_a = AdapterScales())
        .def("close", &Context::close, Unlocked(), "Frees the context; harmless when closed already.")
        .def_prop_ro("closed", &Context::closed)
        .def_prop_ro("model", &Context::model, Unlocked(), "The model it runs.")
        .def_prop_ro("memory", [](std::shared_ptr<Context> context) { return kvasir::Memory(std::move(context)); })
        .def_prop_ro("n_ctx", &Context::n_ctx, "All cells.")
        .def_prop_ro("n_ctx_seq", &Context::n_ctx_seq, "The most tokens one sequence can hold.")
        .def_prop_ro("n_batch", &Context::n_batch)
        .def_prop_ro("n_ubatch", &Context::n_ubatch)
        .def_prop_ro("n_seq_max", &Context::n_seq_max)
        .def_prop_ro("kv_unified", [](const Context &c) { return c.params().kv_unified; })
        .def_prop_ro("pooling", &Context::pooling)
        .def_prop_ro("threads", &Context::threads)
        .def_prop_ro("threads_batch", &Context::threads_batch)
        .def_prop_ro("n_rows_decoded", &Context::n_rows_decoded, "Every token row this context ever decoded.")
        .def(
            "step",
            [](Context &c, const std::vector<Row> &rows) {  // copies: the list may change while the GIL is free
                std::vector<const Row *> pointers;
                for (const Row &row : rows) {
                    pointers.push_back(&row);
                }
                const nb::gil_scoped_release unlocked;
                return c.step(pointers);
            },
            "rows"_a,
            "One decode, then every row with a sampler is sampled, in parallel. Raises BadOption for what llama.cpp "
            "would abort on.")
        .def(
            "logits",
            [](Context &c, int32_t row) {
                std::vector<float> values;
                {
                    const nb::gil_scoped_release unlocked;
                    values = c.logits(row);
                }
                return to_vector(std::move(values));
            },
            "row"_a, nb::sig("def logits(self, row: int) -> numpy.typing.NDArray[numpy.float32]"),
            "A copy of the logits of row `row` of the last step.")
        .def(
            "sample_stored",
            [](Context &c, Sampler &sampler, const nb::bytes &logits, std::optional<int32_t> logprobs) {
                std::vector<float> values(logits.size() % sizeof(float) ? 0 : logits.size() / sizeof(float));
                std::memcpy(values.data(), logits.c_str(), values.size() * sizeof(float));
                const nb::gil_scoped_release unlocked;
                return c.sample_stored(sampler, values, logprobs);
            },
            "sampler"_a, "logits"_a, "logprobs"_a = nb::none(),
            "Samples one row from the bytes of logits that an earlier step left, and decodes nothing.")
        .def(
            "embed",
            [](Context &c, const std::vector<std::vector<int32_t>> &texts) {
                std::vector<float> values;
                {
                    const nb::gil_scoped_release unlocked;
                    values = c.embed(texts);
                }
                return to_matrix(std::move(values), texts.size(), static_cast<size_t>(c.embedding_width()));
            },
            "texts"_a,
            nb::sig("def embed(self, texts: collections.abc.Sequence[collections.abc.Sequence[int]]) -> "
                    "numpy.typing.NDArray[numpy.float32]"),
            "One pooled vector a text (rank pooling: its scores), many texts a decode.")
        .def(
            "embed_tokens",
            [](Context &c, const std::vector<int32_t> &tokens) {
                std::vector<float> values;
                {
                    const nb::gil_scoped_release unlocked;
                    values = c.embed_tokens(tokens);
                }
                return to_matrix(std::move(values), tokens.size(), static_cast<size_t>(c.embedding_width()));
            },
            "tokens"_a,
            nb::sig(
                "def embed_tokens(self, tokens: collections.abc.Sequence[int]) -> numpy.typing.NDArray[numpy.float32]"),
            "One vector a token, for contexts with pooling='none'.")
        .def("set_threads", &Context::set_threads, "threads"_a, "threads_batch"_a, Unlocked())
        .def(
            "set_adapters",
            [](Context &c, const AdapterScales &adapters) {
                const kvasir::Adapters loras = handles(adapters);
                const nb::gil_scoped_release unlocked;
                c.set_adapters(loras);
            },
            "adapters"_a, "Uses these (adapter, scale) pairs from now on, in place of those before.")
        .def("abort", &Context::abort,
             "From any thread: stops a running decode where that is safe (CPU; not recurrent or hybrid), otherwise the "
             "next.")
        .def("clear_abort", &Context::clear_abort)
        .def("synchronize", &Context::synchronize, Unlocked());
}
