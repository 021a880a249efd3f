#include "budget.hpp"

#include <algorithm>
#include <limits>

#include "error.hpp"
#include "reasoning-budget.h"

namespace kvasir {

// Without a budget the state is still needed where a lazy grammar could wake up inside the thinking.
bool ReasoningBudget::wanted(const SamplerParams &params) {
    const bool lazy = params.grammar_lazy && !params.grammar.empty();
    return !params.reasoning_start.empty() && !params.reasoning_ends.empty() && (params.reasoning_budget >= 0 || lazy);
}

ReasoningBudget::ReasoningBudget(const Vocab &vocab, const SamplerParams &params)
    : prefill_(params.reasoning_prefill),
      forced_(params.reasoning_forced.empty() ? params.reasoning_ends.front() : params.reasoning_forced) {
    std::vector<std::vector<llama_token>> markers = params.reasoning_ends;
    markers.insert(markers.end(), {params.reasoning_start, prefill_, forced_});
    for (const auto &marker : markers) {
        std::for_each(marker.begin(), marker.end(), [&](llama_token token) { vocab.check(token); });
    }
    if (forced_.empty()) throw Error(Kind::BadOption, "reasoning_ends holds an empty marker; leave it out.");
    const int32_t n = params.reasoning_budget < 0 ? std::numeric_limits<int32_t>::max() : params.reasoning_budget;
    sampler_.reset(
        common_reasoning_budget_init(vocab.raw(), {params.reasoning_start}, params.reasoning_ends, forced_, n));
    reset();
}

ReasoningBudget::ReasoningBudget(const ReasoningBudget &other)
    : sampler_(llama_sampler_clone(other.sampler_.get())),
      prefill_(other.prefill_),
      forced_(other.forced_),
      n_forced_(other.n_forced_) {}

bool ReasoningBudget::thinking() const {
    const auto state = common_reasoning_budget_get_state(sampler_.get());
    return state != REASONING_BUDGET_IDLE && state != REASONING_BUDGET_DONE;
}

llama_token ReasoningBudget::forced() const {
    const bool forcing = common_reasoning_budget_get_state(sampler_.get()) == REASONING_BUDGET_FORCING;
    return forcing ? forced_[n_forced_] : LLAMA_TOKEN_NULL;
}

void ReasoningBudget::accept(llama_token token) {
    const auto before = common_reasoning_budget_get_state(sampler_.get());
    llama_sampler_accept(sampler_.get(), token);
    n_forced_ = before == REASONING_BUDGET_FORCING ? n_forced_ + 1 : 0;
}

std::vector<llama_token> ReasoningBudget::ended_by() const {
    const llama_tokens *end = common_reasoning_budget_get_end_match(sampler_.get());
    const bool done = common_reasoning_budget_get_state(sampler_.get()) == REASONING_BUDGET_DONE;
    return done && end ? *end : std::vector<llama_token>();
}

void ReasoningBudget::reset() {
    llama_sampler_reset(sampler_.get());
    n_forced_ = 0;
    for (const llama_token token : prefill_) {
        accept(token);
    }
}

}  // namespace kvasir
