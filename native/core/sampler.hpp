// A sampler chain made from a plain value, one per sequence.
//
// The chain's own samplers are llama.cpp's, except the last one and XTC, whose randomness is `draw(seed, index)` and so
// needs no saved state. A grammar stands beside the chain: the cheap way first (sample, then ask the grammar about that
// one token), the whole vocabulary only when it refuses. Locked, so that a misuse from two threads is slow, not fatal.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "llama.h"
#include "vocab.hpp"

namespace kvasir {

struct SamplerParams {
    uint64_t seed = 0;
    std::vector<std::string> order = {"penalties", "dry",   "top_n_sigma", "top_k",      "typical_p",
                                      "top_p",     "min_p", "xtc",         "temperature"};
    float temperature = 0.8f, dynatemp_range = 0.0f, dynatemp_exponent = 1.0f;
    int32_t top_k = 40;
    float top_p = 0.95f, min_p = 0.05f, typical_p = 1.0f, top_n_sigma = -1.0f;
    int32_t min_keep = 1;
    float xtc_probability = 0.0f, xtc_threshold = 0.1f;
    int32_t penalty_last_n = 64;
    float repeat_penalty = 1.0f, frequency_penalty = 0.0f, presence_penalty = 0.0f;
    float dry_multiplier = 0.0f, dry_base = 1.75f;
    int32_t dry_allowed_length = 2, dry_penalty_last_n = 64;
    std::vector<std::string> dry_sequence_breakers = {"\n", ":", "\"", "*"};
    int32_t mirostat = 0;
    float mirostat_tau = 5.0f, mirostat_eta = 0.1f;
    float adaptive_target = -1.0f, adaptive_decay = 0.9f;
    std::vector<std::pair<llama_token, float>> logit_bias;
    bool ignore_eos = false;
    std::string grammar, grammar_root = "root";
    bool grammar_lazy = false;
    std::vector<std::string> grammar_trigger_patterns;
    std::vector<llama_token> grammar_trigger_tokens;
    std::vector<llama_token> grammar_prefill;  // what the prompt has already written of a text under the grammar
    int32_t reasoning_budget = -1;             // tokens of thinking; -1: as many as the model likes
    std::vector<llama_token> reasoning_start;
    std::vector<std::vector<llama_token>> reasoning_ends;
    std::vector<llama_token> reasoning_forced;   // what is written when the budget is spent
    std::vector<llama_token> reasoning_prefill;  // the end of the prompt, which may have opened the thinking
};

const std::vector<std::string> &sampler_names();

struct SamplerDeleter {
    void operator()(llama_sampler *sampler) const { llama_sampler_free(sampler); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerDeleter>;

struct Candidates;
class ReasoningBudget;

class Sampler {
  public:
    Sampler(const Vocab &vocab, const SamplerParams &params);

    // Picks a token from one row of logits and accepts it. Raises BadGrammar when the grammar admits no token at all.
    llama_token sample(const float *logits);

    // A token that was fed, not sampled: generated=false for a prompt, which moves the penalties but not the draws.
    void accept(llama_token token, bool generated);
    void accept_prompt(const std::vector<llama_token> &tokens);

    void reset();
    std::unique_ptr<Sampler> clone() const;
    std::vector<std::string> names() const;
    uint64_t seed() const { return params_.seed; }
    uint32_t n_draws() const;
    void seek(uint32_t index);
    const Vocab &vocab() const { return vocab_; }

  private:
    struct Link {
        std::string name;
        SamplerPtr sampler;  // null for our own: xtc
    };

    void build();
    void check_numbers() const;
    std::vector<llama_logit_bias> biases() const;
    void add(const std::string &name, llama_sampler *sampler);
    void add_by_name(const std::string &name);
    void add_last();
    void build_grammar();
    bool needs_history() const;
    llama_token pick(const float *logits, bool with_grammar);
    const float *edit(const float *logits);
    void apply_chain(Candidates &candidates, size_t first_link) const;
    void apply_xtc(llama_token_data_array &array) const;
    llama_token select(llama_token_data_array &array) const;
    bool grammar_applies() const;
    bool grammar_allows(llama_token token) const;
    void prefill_grammar();
    void accept_locked(llama_token token, bool generated);

    Vocab vocab_;
    SamplerParams params_;
    std::vector<Link> chain_;
    size_t n_edits_ = 0;  // links at the head of the chain that `edit` stands for
    std::vector<llama_logit_bias> biases_;
    std::deque<llama_token> recent_;  // what the penalties look back on
    SamplerPtr grammar_;
    std::unique_ptr<ReasoningBudget> budget_;  // null where thinking is not limited
    bool greedy_ = false;
    bool selects_itself_ = false;  // mirostat and adaptive_p pick the token, the others leave it to us
    uint32_t index_ = 0;
    uint32_t attempt_ = 0;
    std::unique_ptr<Candidates> candidates_;
    mutable std::mutex mutex_;

  public:
    ~Sampler();
};

}  // namespace kvasir
