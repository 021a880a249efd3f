// How long a model may think: llama.cpp's reasoning budget, and which token it wants next.
//
// Counts the tokens between the start and the end of a block of thinking, writes the end when they are spent, and says
// when a lazy grammar must sleep because what looks like its trigger is only thought.
#pragma once

#include <memory>
#include <vector>

#include "sampler.hpp"

namespace kvasir {

class ReasoningBudget {
  public:
    static bool wanted(const SamplerParams &params);
    ReasoningBudget(const Vocab &vocab, const SamplerParams &params);
    ReasoningBudget(const ReasoningBudget &other);

    bool thinking() const;
    llama_token forced() const;  // LLAMA_TOKEN_NULL where the model is free
    void accept(llama_token token);
    std::vector<llama_token> ended_by() const;  // the marker that ended the thinking; nothing before that
    void reset();

  private:
    SamplerPtr sampler_;
    std::vector<llama_token> prefill_, forced_;
    size_t n_forced_ = 0;
};

}  // namespace kvasir
