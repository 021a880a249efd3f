// One llama_context: a step a tick (decode, then sample every row in parallel), logits, embeddings, abort.
//
// Every call takes the context's lock, so two threads are slow, not fatal; one thread is meant to own it. What would
// trip a GGML_ASSERT is refused first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"
#include "model.hpp"
#include "pool.hpp"
#include "sampler.hpp"
#include "threads.hpp"

namespace kvasir {

struct ContextParams {
    int64_t n_ctx = 0, n_batch = 512, n_ubatch = 512, n_seq_max = 1;
    int32_t threads = 0, threads_batch = 0, sample_threads = 0, poll = 50;
    bool kv_unified = true, swa_full = true, offload_kqv = true, op_offload = true, embeddings = false;
    std::string flash_attn = "auto", type_k = "f16", type_v = "f16", pooling = "model", attention = "model",
                rope_scaling = "model";
    float rope_freq_base = 0.0f, rope_freq_scale = 0.0f;
    float yarn_ext_factor = -1.0f, yarn_attn_factor = -1.0f, yarn_beta_fast = -1.0f, yarn_beta_slow = -1.0f;
    int64_t yarn_orig_ctx = 0;
};

using Adapters = std::vector<std::pair<std::shared_ptr<AdapterHandle>, float>>;

const std::vector<std::string> &kv_type_names();

// One sequence's part of a step: tokens at consecutive positions; sampled after the last one where a sampler is given.
struct Row {
    llama_seq_id seq;
    llama_pos pos;
    std::vector<llama_token> tokens;
    std::shared_ptr<Sampler> sampler;
    std::optional<int32_t> logprobs;
    bool output;
};

struct TokenLogprobs {
    float logprob;
    std::vector<std::pair<llama_token, float>> top;
};

struct Step {
    std::string status;
    std::vector<std::optional<llama_token>> tokens;
    std::vector<std::optional<TokenLogprobs>> logprobs;
    std::vector<std::optional<std::string>> errors;
    double decode_s = 0.0, sample_s = 0.0;
};

struct ContextDeleter {
    void operator()(llama_context *context) const { llama_free(context); }
};

// llama_batch with an owner.
struct Batch : llama_batch {
    Batch() : llama_batch{} {}
    explicit Batch(int32_t n_tokens) : llama_batch(llama_batch_init(n_tokens, 0, 1)) {}
    ~Batch() { llama_batch_free(*this); }
    Batch(const Batch &) = delete;
    Batch &operator=(Batch &&other) {
        std::swap(static_cast<llama_batch &>(*this), static_cast<llama_batch &>(other));
        return *this;
    }
};

class Context {
  public:
    Context(const Model &model, const ContextParams &params, const Adapters &adapters);
    ~Context() { close(); }
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    void close();
    bool closed() const { return closed_; }
    std::unique_ptr<Model> model();  // the model it runs, open also where the one it was made with is closed

    Step step(const std::vector<const Row *> &rows);
    std::vector<float> logits(int32_t row);
    llama_token sample(Sampler &sampler, int32_t row);
    // As step(), for one row whose logits an earlier one left: nothing is decoded.
    Step sample_stored(Sampler &sampler, const std::vector<float> &logits, std::optional<int32_t> logprobs);

    // One vector a text, many texts a decode; and one vector a token for contexts without pooling.
    std::vector<float> embed(const std::vector<std::vector<llama_token>> &texts);
    std::vector<float> embed_tokens(const std::vector<llama_token> &tokens);
    int32_t embedding_width() const { return open().embedding_width; }

    void set_threads(int32_t threads, int32_t threads_batch);
    void set_adapters(const Adapters &adapters);
    void abort() { abort_ = true; }  // heeded inside a decode, never inside a shift, which could not be taken back
    void clear_abort() { abort_ = false; }
    void synchronize();

    // Kept beside the context, so that reading them waits for no decode and survives a close() in another thread.
    int64_t n_ctx() const { return open().n_ctx; }
    int64_t n_ctx_seq() const { return open().n_ctx_seq; }
    int64_t n_batch() const { return open().n_batch; }
    int64_t n_ubatch() const { return open().n_ubatch; }
    int64_t n_seq_max() const { return open().n_seq_max; }
    std::string pooling() const { return open().pooling; }
    int32_t threads() const;
    int32_t threads_batch() const;
    const ContextParams &params() const { return params_; }
    uint64_t n_rows_decoded() const { return n_rows_decoded_; }

    // For Memory: the open context under its lock.
    std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }
    llama_context *raw();
    const std::string &memory_kind() const { return memory_kind_; }
    int32_t n_swa() const { return n_swa_; }
    bool shifts_exactly();
    void check_seq(llama_seq_id seq);
    void forget_outputs() { outputs_.clear(); }
    void apply_pending();  // computes what shifts and copies have left to the next decode

  private:
    struct Facts {
        int64_t n_ctx = 0, n_ctx_seq = 0, n_batch = 0, n_ubatch = 0, n_seq_max = 0;
        int64_t n_positions = 0;
        int64_t n_step = 0;  // the most tokens one decode takes
        std::string pooling;
        int32_t embedding_width = 0;
        bool has_memory = false;
    };
    void learn_facts();
    const Facts &open() const;  // raises Closed
    void check_rows(const std::vector<const Row *> &rows);
    void check_positions(llama_pos first, size_t n) const;
    void check_sampler(const Sampler &sampler) const;
    static void check_logprobs(std::optional<int32_t> logprobs);
    void fill(const std::vector<const Row *> &rows);
    int32_t decode();
    void count_after_failure(const std::vector<const Row *> &rows);
    void sample_rows(const std::vector<const Row *> &rows, Step &step);
    void sample_row(Sampler &sampler, const float *logits, std::optional<int32_t> logprobs, Step &step,
                    size_t at) const;
    const float *logits_of(int32_t row);
    void run_embedding_batch(const std::vector<std::vector<llama_token>> &texts, size_t first, size_t n);
    void check_embedding(const std::vector<llama_token> &text);

    ContextParams params_;
    std::shared_ptr<ModelHandle> model_;
    Adapters adapters_;
    std::string memory_kind_;
    int32_t n_swa_ = 0, n_vocab_ = 0, n_embd_out_ = 0, n_cls_out_ = 0, n_compute_threads_ = 1;
    std::shared_ptr<ComputeThreads> compute_threads_;         // none where one thread computes: the caller's
    std::unique_ptr<llama_context, ContextDeleter> context_;  // after the thread pool it uses, so freed before it
    std::unique_ptr<Pool> sample_threads_;
    Batch batch_;
    Facts facts_;
    std::atomic<int32_t> n_threads_{1}, n_threads_batch_{1};
    std::vector<int32_t> outputs_;  // batch index of each row's last token, -1 where it has no output
    std::atomic<bool> abort_{false};
    std::atomic<bool> decoding_{false};
    std::atomic<bool> closed_{false};
    std::atomic<uint64_t> n_rows_decoded_{0};
    std::mutex mutex_;
};

}  // namespace kvasir
