#include "context.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "error.hpp"
#include "runtime.hpp"
#include "spans.hpp"

namespace kvasir {
namespace {

constexpr int64_t MAX_CELLS = int64_t(1) << 31;
constexpr int64_t MAX_SEQUENCES = 256;  // LLAMA_MAX_SEQ

const std::map<std::string, ggml_type> &kv_types() {
    static const std::map<std::string, ggml_type> types = {
        {"f32", GGML_TYPE_F32},   {"f16", GGML_TYPE_F16},       {"bf16", GGML_TYPE_BF16},
        {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0},     {"q4_1", GGML_TYPE_Q4_1},
        {"q5_0", GGML_TYPE_Q5_0}, {"iq4_nl", GGML_TYPE_IQ4_NL}, {"q5_1", GGML_TYPE_Q5_1},
    };
    return types;
}

template <class Value>
Value lookup(const char *option, const std::map<std::string, Value> &table, const std::string &name) {
    const auto found = table.find(name);
    if (found == table.end()) {
        std::string known;
        for (const auto &entry : table) {
            known += (known.empty() ? "'" : ", '") + entry.first + "'";
        }
        throw Error(Kind::BadOption, std::string(option) + " is one of " + known + ", not '" + name + "'.");
    }
    return found->second;
}

void check_range(const char *option, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
        throw Error(Kind::BadOption, std::string(option) + " is " + std::to_string(value) + "; it must be " +
                                         std::to_string(least) + " to " + std::to_string(most) + ".");
    }
}

llama_context_params raw_params(const ContextParams &p) {
    check_range("n_ctx", p.n_ctx, 0, MAX_CELLS - 1);
    check_range("n_seq_max", p.n_seq_max, 1, MAX_SEQUENCES);
    check_range("n_batch", p.n_batch, 1, 1 << 20);
    check_range("n_ubatch", p.n_ubatch, 1, 1 << 20);
    check_range("threads", p.threads, 0, GGML_MAX_N_THREADS);
    check_range("threads_batch", p.threads_batch, 0, GGML_MAX_N_THREADS);
    check_range("sample_threads", p.sample_threads, 0, GGML_MAX_N_THREADS);
    check_range("poll", p.poll, 0, 100);
    check_range("yarn_orig_ctx", p.yarn_orig_ctx, 0, MAX_CELLS - 1);
    if (p.n_batch < p.n_seq_max) {
        throw Error(Kind::BadOption, "n_batch is " + std::to_string(p.n_batch) + " but there are " +
                                         std::to_string(p.n_seq_max) +
                                         " sequences; a batch must hold one token of each.");
    }
    if (p.n_ctx > 0 && p.n_ctx < p.n_seq_max) {
        throw Error(Kind::BadOption, "n_ctx is " + std::to_string(p.n_ctx) + ", fewer cells than the " +
                                         std::to_string(p.n_seq_max) + " sequences.");
    }
    llama_context_params raw = llama_context_default_params();
    raw.n_ctx = static_cast<uint32_t>(p.n_ctx);
    raw.n_batch = static_cast<uint32_t>(p.n_batch);
    raw.n_ubatch = static_cast<uint32_t>(std::min(p.n_ubatch, p.n_batch));
    raw.n_seq_max = static_cast<uint32_t>(p.n_seq_max);
    // One output a sequence and step: keeps the logits buffer small. Embeddings output every token.
    raw.n_outputs_max = p.embeddings ? 0 : static_cast<uint32_t>(p.n_seq_max);
    raw.kv_unified = p.kv_unified;
    raw.swa_full = p.swa_full;
    raw.offload_kqv = p.offload_kqv;
    raw.op_offload = p.op_offload;
    raw.embeddings = p.embeddings;
    raw.no_perf = true;
    raw.flash_attn_type = lookup<llama_flash_attn_type>("flash_attn",
                                                        {{"auto", LLAMA_FLASH_ATTN_TYPE_AUTO},
                                                         {"on", LLAMA_FLASH_ATTN_TYPE_ENABLED},
                                                         {"off", LLAMA_FLASH_ATTN_TYPE_DISABLED}},
                                                        p.flash_attn);
    raw.type_k = lookup("type_k", kv_types(), p.type_k);
    raw.type_v = lookup("type_v", kv_types(), p.type_v);
    if (p.flash_attn == "off" && ggml_is_quantized(raw.type_v)) {
        throw Error(Kind::BadOption,
                    "type_v='" + p.type_v + "' needs flash attention; leave flash_attn at 'auto' or use type_v='f16'.");
    }
    raw.pooling_type = lookup<enum llama_pooling_type>("pooling",
                                                       {{"model", LLAMA_POOLING_TYPE_UNSPECIFIED},
                                                        {"none", LLAMA_POOLING_TYPE_NONE},
                                                        {"mean", LLAMA_POOLING_TYPE_MEAN},
                                                        {"cls", LLAMA_POOLING_TYPE_CLS},
                                                        {"last", LLAMA_POOLING_TYPE_LAST},
                                                        {"rank", LLAMA_POOLING_TYPE_RANK}},
                                                       p.pooling);
    raw.attention_type = lookup<llama_attention_type>("attention",
                                                      {{"model", LLAMA_ATTENTION_TYPE_UNSPECIFIED},
                                                       {"causal", LLAMA_ATTENTION_TYPE_CAUSAL},
                                                       {"non_causal", LLAMA_ATTENTION_TYPE_NON_CAUSAL}},
                                                      p.attention);
    raw.rope_scaling_type = lookup<llama_rope_scaling_type>("rope_scaling",
                                                            {{"model", LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED},
                                                             {"none", LLAMA_ROPE_SCALING_TYPE_NONE},
                                                             {"linear", LLAMA_ROPE_SCALING_TYPE_LINEAR},
                                                             {"yarn", LLAMA_ROPE_SCALING_TYPE_YARN},
                                                             {"longrope", LLAMA_ROPE_SCALING_TYPE_LONGROPE}},
                                                            p.rope_scaling);
    raw.rope_freq_base = p.rope_freq_base;
    raw.rope_freq_scale = p.rope_freq_scale;
    raw.yarn_ext_factor = p.yarn_ext_factor;
    raw.yarn_attn_factor = p.yarn_attn_factor;
    raw.yarn_beta_fast = p.yarn_beta_fast;
    raw.yarn_beta_slow = p.yarn_beta_slow;
    raw.yarn_orig_ctx = static_cast<uint32_t>(p.yarn_orig_ctx);
    return raw;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TokenLogprobs logprobs_of(const float *logits, int32_t n_vocab, llama_token token, int32_t n_top) {
    const float largest = *std::max_element(logits, logits + n_vocab);
    double sum = 0.0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        sum += std::exp(logits[i] - largest);
    }
    const float norm = largest + static_cast<float>(std::log(sum));
    TokenLogprobs out{logits[token] - norm, {}};
    if (n_top == 0) {
        return out;
    }
    std::vector<llama_token> ids(static_cast<size_t>(n_vocab));
    for (int32_t i = 0; i < n_vocab; ++i) {
        ids[static_cast<size_t>(i)] = i;
    }
    const auto n = std::min(n_top, n_vocab);
    std::partial_sort(ids.begin(), ids.begin() + n, ids.end(),
                      [&](llama_token a, llama_token b) { return logits[a] > logits[b]; });
    for (int32_t i = 0; i < n; ++i) {
        const llama_token id = ids[static_cast<size_t>(i)];
        out.top.emplace_back(id, logits[id] - norm);
    }
    return out;
}

}  // namespace

const std::vector<std::string> &kv_type_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> out;
        for (const auto &entry : kv_types()) {
            out.push_back(entry.first);
        }
        return out;
    }();
    return names;
}

Context::Context(const Model &model, const ContextParams &params, const Adapters &adapters)
    : params_(params), model_(model.handle()), memory_kind_(model.memory_kind()) {
    if (model.vocab_only()) {
        throw Error(Kind::Unsupported, "this model was loaded with vocab_only and has no weights to run.");
    }
    llama_context_params raw = raw_params(params);
    const int32_t cores = std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
    raw.n_threads = params.threads > 0 ? params.threads : cores;
    raw.n_threads_batch = params.threads_batch > 0 ? params.threads_batch : raw.n_threads;

    LogCapture log;
    llama_context *context = nullptr;
    with_abort_trap(Kind::ModelLoadError, "making a context",
                    [&] { context = llama_init_from_model(model_->model, raw); });
    if (!context) {
        throw Error(Kind::ModelLoadError, "a context of " + std::to_string(params.n_ctx) +
                                              " cells could not be made: " + log.reason("llama.cpp gave no reason") +
                                              ".");
    }
    context_.reset(context);

    n_compute_threads_ = std::max(raw.n_threads, raw.n_threads_batch);
    const int32_t n_threads = n_compute_threads_;
    if (n_threads > 1) {
        compute_threads_ = ComputeThreads::lend(n_threads, static_cast<uint32_t>(params.poll));
        llama_attach_threadpool(context, compute_threads_->pool(), compute_threads_->pool());
    }
    const auto n_sample = static_cast<size_t>(params.sample_threads > 0 ? params.sample_threads : n_threads);
    sample_threads_ = std::make_unique<Pool>(std::min<size_t>(n_sample, static_cast<size_t>(params.n_seq_max)));

    n_swa_ = llama_model_n_swa(model_->model);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_->model));
    n_embd_out_ = llama_model_n_embd_out(model_->model);
    n_cls_out_ = static_cast<int32_t>(llama_model_n_cls_out(model_->model));
    n_threads_ = raw.n_threads;
    n_threads_batch_ = raw.n_threads_batch;
    learn_facts();
    batch_ = Batch(static_cast<int32_t>(facts_.n_batch));
    // An abort inside a decode is safe only where a half-done ubatch can be taken back.
    if (memory_kind_ == "plain" || memory_kind_ == "window") {
        const auto stop = [](void *self) {
            const auto *context = static_cast<const Context *>(self);
            return context->abort_.load(std::memory_order_relaxed) &&
                   context->decoding_.load(std::memory_order_relaxed);
        };
        llama_set_abort_callback(context, stop, this);
    }
    if (!adapters.empty()) {
        set_adapters(adapters);
    }
}

void Context::learn_facts() {
    static const std::map<enum llama_pooling_type, const char *> poolings = {{LLAMA_POOLING_TYPE_MEAN, "mean"},
                                                                             {LLAMA_POOLING_TYPE_CLS, "cls"},
                                                                             {LLAMA_POOLING_TYPE_LAST, "last"},
                                                                             {LLAMA_POOLING_TYPE_RANK, "rank"}};
    const llama_context *context = context_.get();
    facts_.n_ctx = llama_n_ctx(context);
    facts_.n_ctx_seq = llama_n_ctx_seq(context);
    facts_.n_batch = llama_n_batch(context);
    facts_.n_ubatch = llama_n_ubatch(context);
    facts_.n_seq_max = llama_n_seq_max(context);
    facts_.n_positions = n_positions(model_->model);
    facts_.has_memory = llama_get_memory(context) != nullptr;
    facts_.n_step = is_causal(context) ? facts_.n_batch : std::min(facts_.n_batch, facts_.n_ubatch);
    const auto pooling = poolings.find(llama_pooling_type(context));
    facts_.pooling = pooling == poolings.end() ? "none" : pooling->second;
    facts_.embedding_width = facts_.pooling == "rank" ? n_cls_out_ : n_embd_out_;
}

const Context::Facts &Context::open() const {
    if (closed_) {
        throw Error(Kind::Closed, "this context is closed; make a new one to go on.");
    }
    return facts_;
}

int32_t Context::threads() const {
    open();
    return n_threads_;
}

int32_t Context::threads_batch() const {
    open();
    return n_threads_batch_;
}

void Context::close() {
    abort_ = true;  // a decode in another thread ends soon
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.exchange(true)) {
        return;
    }
    sample_threads_.reset();
    context_.reset();
    compute_threads_.reset();
    batch_ = Batch();
    adapters_.clear();
    model_.reset();
}

std::unique_ptr<Model> Context::model() {
    const auto guard = lock();
    open();
    return std::make_unique<Model>(model_, false);
}

llama_context *Context::raw() {
    open();
    return context_.get();
}

void Context::check_seq(llama_seq_id seq) {
    if (seq < 0 || seq >= params_.n_seq_max) {
        throw Error(Kind::BadOption, "sequence " + std::to_string(seq) +
                                         " does not exist; this context has sequences 0 to " +
                                         std::to_string(params_.n_seq_max - 1) + ".");
    }
}

void Context::check_rows(const std::vector<const Row *> &rows) {
    if (rows.empty()) {
        throw Error(Kind::BadOption, "a step needs at least one row.");
    }
    if (params_.embeddings) {
        throw Error(Kind::BadOption, "this context makes embeddings; make one with embeddings=False to generate.");
    }
    if (!facts_.has_memory) {
        throw Error(Kind::BadOption,
                    "this model is an encoder and generates nothing; make a context with embeddings=True.");
    }
    std::set<llama_seq_id> seen;
    size_t n_tokens = 0;
    for (const Row *row : rows) {
        check_seq(row->seq);
        if (!seen.insert(row->seq).second) {
            throw Error(Kind::BadOption, "sequence " + std::to_string(row->seq) + " appears twice in one step.");
        }
        if (row->tokens.empty()) {
            throw Error(Kind::BadOption, "the row of sequence " + std::to_string(row->seq) + " has no tokens.");
        }
        if (row->pos < 0) {
            throw Error(Kind::BadOption, "position " + std::to_string(row->pos) + " is negative.");
        }
        check_positions(row->pos, row->tokens.size());
        if (row->tokens.size() > static_cast<size_t>(INT32_MAX - row->pos)) {
            throw Error(Kind::BadOption,
                        "the row of sequence " + std::to_string(row->seq) + " leaves the range of positions.");
        }
        check_logprobs(row->logprobs);
        for (const llama_token token : row->tokens) {
            if (token < 0 || token >= n_vocab_) {
                throw Error(Kind::BadOption, "token id " + std::to_string(token) +
                                                 " is outside this vocabulary, which has ids 0 to " +
                                                 std::to_string(n_vocab_ - 1) + ".");
            }
        }
        if (row->sampler) check_sampler(*row->sampler);
        n_tokens += row->tokens.size();
    }
    if (n_tokens > static_cast<size_t>(facts_.n_step)) {
        throw Error(Kind::BadOption, "a step of " + std::to_string(n_tokens) +
                                         " tokens is more than n_batch (n_ubatch without causal attention), " +
                                         std::to_string(facts_.n_step) + ".");
    }
}

void Context::check_positions(llama_pos first, size_t n) const {
    if (static_cast<int64_t>(first) + static_cast<int64_t>(n) > facts_.n_positions) {
        throw Error(Kind::BadOption, std::to_string(n) + " tokens at position " + std::to_string(first) +
                                         " are more than the " + std::to_string(facts_.n_positions) +
                                         " positions this model knows.");
    }
}

void Context::check_logprobs(std::optional<int32_t> logprobs) {
    if (logprobs && *logprobs < 0) {
        throw Error(Kind::BadOption,
                    "logprobs counts alternatives; it is " + std::to_string(*logprobs) + ", which is negative.");
    }
}

void Context::check_sampler(const Sampler &sampler) const {
    if (sampler.vocab().n_tokens() != n_vocab_) {
        throw Error(Kind::BadOption, "the sampler was made for another model's vocabulary.");
    }
}

void Context::fill(const std::vector<const Row *> &rows) {
    batch_.n_tokens = 0;
    outputs_.clear();
    for (const Row *row : rows) {
        llama_pos pos = row->pos;
        for (const llama_token token : row->tokens) {
            const int32_t i = batch_.n_tokens++;
            batch_.token[i] = token;
            batch_.pos[i] = pos++;
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = row->seq;
            batch_.logits[i] = 0;
        }
        const bool output = row->sampler || row->output || row->logprobs;
        batch_.logits[batch_.n_tokens - 1] = output ? 1 : 0;
        outputs_.push_back(output ? batch_.n_tokens - 1 : -1);
    }
}

int32_t Context::decode() {
    const ComputeTurn turn(compute_threads_.get(), batch_.n_tokens > 1 ? n_threads_batch_ : n_threads_);
    int32_t rc = -3;
    decoding_ = true;
    try {
        rc = facts_.has_memory ? llama_decode(context_.get(), batch_) : llama_encode(context_.get(), batch_);
    } catch (const std::exception &) {  // no memory for a graph or its outputs: reported as failed, like its own codes
        rc = -3;
    }
    decoding_ = false;
    if (rc == 0) {
        llama_synchronize(context_.get());
        n_rows_decoded_ += static_cast<uint64_t>(batch_.n_tokens);
    }
    return rc;
}

void Context::apply_pending() {
    const ComputeTurn turn(compute_threads_.get(), n_threads_);
    kvasir::apply_pending(raw());
}

void Context::count_after_failure(const std::vector<const Row *> &rows) {
    llama_memory_t memory = llama_get_memory(context_.get());
    for (const Row *row : rows) {
        const int64_t kept = int64_t(llama_memory_seq_pos_max(memory, row->seq)) + 1 - row->pos;
        n_rows_decoded_ +=
            static_cast<uint64_t>(std::clamp<int64_t>(kept, 0, static_cast<int64_t>(row->tokens.size())));
    }
}

Step Context::step(const std::vector<const Row *> &rows) {
    const auto guard = lock();
    raw();
    check_rows(rows);
    Step step;
    step.tokens.resize(rows.size());
    step.logprobs.resize(rows.size());
    step.errors.resize(rows.size());
    if (abort_) {
        step.status = "aborted";
        return step;
    }
    fill(rows);
    const auto start = std::chrono::steady_clock::now();
    const int32_t rc = decode();
    step.decode_s = seconds_since(start);
    if (rc == 0) {
        step.status = "ok";
        sample_rows(rows, step);
        step.sample_s = seconds_since(start) - step.decode_s;
        return step;
    }
    outputs_.clear();
    if (rc == 1) {
        step.status = "no_room";
    } else if (rc == -1) {
        step.status = "bad_batch";
    } else {
        step.status = rc == 2 ? "aborted" : "failed";
        count_after_failure(rows);
    }
    return step;
}

void Context::sample_rows(const std::vector<const Row *> &rows, Step &step) {
    // Touching the context reorders its output rows, so this thread fetches every pointer first; then each row is its
    // own.
    struct Job {
        size_t row;
        const float *logits;
    };
    std::vector<Job> jobs;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i]->sampler) {
            jobs.push_back({i, llama_get_logits_ith(context_.get(), outputs_[i])});
        }
    }
    sample_threads_->each(jobs.size(), [&](size_t j) {
        const Row &row = *rows[jobs[j].row];
        sample_row(*row.sampler, jobs[j].logits, row.logprobs, step, jobs[j].row);
    });
}

void Context::sample_row(Sampler &sampler, const float *logits, std::optional<int32_t> logprobs, Step &step,
                         size_t at) const {
    try {
        if (!logits) throw Error(Kind::BadOption, "the decode left no logits for this row.");
        const llama_token token = sampler.sample(logits);
        step.tokens[at] = token;
        if (logprobs) step.logprobs[at] = logprobs_of(logits, n_vocab_, token, *logprobs);
    } catch (const std::exception &e) {
        step.errors[at] = e.what();
    }
}

Step Context::sample_stored(Sampler &sampler, const std::vector<float> &logits, std::optional<int32_t> logprobs) {
    const auto guard = lock();
    raw();
    check_sampler(sampler);
    check_logprobs(logprobs);
    if (logits.size() != static_cast<size_t>(n_vocab_)) {
        throw Error(Kind::BadOption, "these bytes are " + std::to_string(logits.size()) +
                                         " logits, and this model's vocabulary has " + std::to_string(n_vocab_) +
                                         " tokens.");
    }
    const auto start = std::chrono::steady_clock::now();
    Step step;
    step.status = "ok";
    step.tokens.resize(1);
    step.logprobs.resize(1);
    step.errors.resize(1);
    sample_row(sampler, logits.data(), logprobs, step, 0);
    step.sample_s = seconds_since(start);
    return step;
}

const float *Context::logits_of(int32_t row) {
    llama_context *context = raw();
    if (row < 0 || static_cast<size_t>(row) >= outputs_.size() || outputs_[static_cast<size_t>(row)] < 0) {
        throw Error(Kind::BadOption, "row " + std::to_string(row) +
                                         " of the last step has no logits; give it a sampler or output=True.");
    }
    const float *logits = llama_get_logits_ith(context, outputs_[static_cast<size_t>(row)]);
    if (!logits) {
        throw Error(Kind::BadOption, "the last step left no logits for row " + std::to_string(row) + ".");
    }
    return logits;
}

std::vector<float> Context::logits(int32_t row) {
    const auto guard = lock();
    const float *logits = logits_of(row);
    return std::vector<float>(logits, logits + n_vocab_);
}

llama_token Context::sample(Sampler &sampler, int32_t row) {
    const auto guard = lock();
    const float *logits = logits_of(row);
    check_sampler(sampler);
    return sampler.sample(logits);
}

void Context::check_embedding(const std::vector<llama_token> &text) {
    if (!params_.embeddings) {
        throw Error(Kind::BadOption, "this context generates; make one with embeddings=True for embeddings.");
    }
    if (text.empty()) {
        throw Error(Kind::BadOption, "an empty text has no embedding.");
    }
    check_positions(0, text.size());
    if (text.size() > llama_n_ubatch(context_.get())) {
        throw Error(Kind::BadOption, "a text of " + std::to_string(text.size()) + " tokens does not fit one batch of " +
                                         std::to_string(llama_n_ubatch(context_.get())) +
                                         "; make the context with larger n_batch and n_ubatch.");
    }
    for (const llama_token token : text) {
        if (token < 0 || token >= n_vocab_) {
            throw Error(Kind::BadOption, "token id " + std::to_string(token) +
                                             " is outside this vocabulary, which has ids 0 to " +
                                             std::to_string(n_vocab_ - 1) + ".");
        }
    }
}

void Context::run_embedding_batch(const std::vector<std::vector<llama_token>> &texts, size_t first, size_t n) {
    llama_context *context = context_.get();
    if (abort_) {
        throw Error(Kind::EngineStopped, "this context was told to stop.");
    }
    if (llama_memory_t memory = llama_get_memory(context)) {
        llama_memory_clear(memory, false);
    }
    batch_.n_tokens = 0;
    for (size_t t = 0; t < n; ++t) {
        llama_pos pos = 0;
        for (const llama_token token : texts[first + t]) {
            const int32_t i = batch_.n_tokens++;
            batch_.token[i] = token;
            batch_.pos[i] = pos++;
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = static_cast<llama_seq_id>(t);
            batch_.logits[i] = 1;
        }
    }
    const int32_t rc = decode();
    if (rc != 0) {
        throw Error(rc == 2 ? Kind::EngineStopped : Kind::BadOption,
                    "llama.cpp could not embed this batch (code " + std::to_string(rc) + ").");
    }
}

std::vector<float> Context::embed(const std::vector<std::vector<llama_token>> &texts) {
    const auto guard = lock();
    llama_context *context = raw();
    if (params_.embeddings && llama_pooling_type(context) == LLAMA_POOLING_TYPE_NONE) {
        throw Error(Kind::BadOption, "this context pools nothing; use embed_tokens(), or make it with pooling='mean'.");
    }
    for (const auto &text : texts) {
        check_embedding(text);
    }
    const auto width = static_cast<size_t>(embedding_width());
    std::vector<float> out;
    out.reserve(texts.size() * width);
    size_t first = 0;
    while (first < texts.size()) {
        size_t n = 0, n_tokens = 0;
        while (first + n < texts.size() && n < static_cast<size_t>(params_.n_seq_max) &&
               n_tokens + texts[first + n].size() <= llama_n_ubatch(context)) {
            n_tokens += texts[first + n].size();
            ++n;
        }
        run_embedding_batch(texts, first, n);
        for (size_t t = 0; t < n; ++t) {
            const float *vector = llama_get_embeddings_seq(context, static_cast<llama_seq_id>(t));
            if (!vector) throw Error(Kind::Unsupported, "this model gives no embeddings.");
            out.insert(out.end(), vector, vector + width);
        }
        first += n;
    }
    return out;
}

std::vector<float> Context::embed_tokens(const std::vector<llama_token> &tokens) {
    const auto guard = lock();
    llama_context *context = raw();
    check_embedding(tokens);
    if (llama_pooling_type(context) != LLAMA_POOLING_TYPE_NONE) {
        throw Error(Kind::BadOption,
                    "this context pools its embeddings; make it with pooling='none' for one vector a token.");
    }
    run_embedding_batch({tokens}, 0, 1);
    std::vector<float> out;
    for (int32_t i = 0; i < batch_.n_tokens; ++i) {
        const float *vector = llama_get_embeddings_ith(context, i);
        if (!vector) throw Error(Kind::Unsupported, "this model gives no embeddings.");
        out.insert(out.end(), vector, vector + n_embd_out_);
    }
    return out;
}

void Context::set_threads(int32_t threads, int32_t threads_batch) {
    const auto guard = lock();
    const int32_t most = n_compute_threads_;
    check_range("threads", threads, 1, most);
    check_range("threads_batch", threads_batch, 1, most);
    llama_set_n_threads(raw(), threads, threads_batch);
    n_threads_ = threads;
    n_threads_batch_ = threads_batch;
}

void Context::set_adapters(const Adapters &adapters) {
    const auto guard = lock();
    llama_context *context = raw();
    std::vector<llama_adapter_lora *> loras;
    std::vector<float> scales;
    for (const auto &[handle, scale] : adapters) {
        if (handle->model != model_) {
            throw Error(Kind::BadOption, "the adapter was loaded for another model.");
        }
        loras.push_back(handle->adapter);
        scales.push_back(scale);
    }
    with_abort_trap(Kind::BadOption, "setting adapters", [&] {
        if (llama_set_adapters_lora(context, loras.data(), loras.size(), scales.data()) != 0) {
            throw Error(Kind::BadOption, "llama.cpp refused these adapters.");
        }
    });
    adapters_ = adapters;
}

void Context::synchronize() {
    const auto guard = lock();
    llama_synchronize(raw());
}

// llama.cpp says "can shift" for memories where a shift crashes or is wrong; these are its unwritten conditions.
bool Context::shifts_exactly() {
    llama_memory_t memory = llama_get_memory(raw());
    const bool kind_ok = memory_kind_ == "plain" || memory_kind_ == "window";
    const bool k_ok = params_.type_k == "f16" || params_.type_k == "f32";
    return memory && kind_ok && k_ok && rope_is_relative(context_.get()) && llama_memory_can_shift(memory);
}

}  // namespace kvasir
