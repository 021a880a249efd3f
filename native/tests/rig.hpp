// Short ways to a model, a context, a row and a logits vector.
#pragma once

#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/context.hpp"
#include "core/memory.hpp"
#include "core/model.hpp"
#include "core/sampler.hpp"
#include "harness.hpp"

namespace test {

using Tokens = std::vector<llama_token>;

inline std::unique_ptr<kvasir::Model> load(const char *name = "llama") { return kvasir::Model::load(model(name), {}); }

inline kvasir::ContextParams params(bool unified = true, int64_t n_seq_max = 4) {
    kvasir::ContextParams p;
    p.n_ctx = 1024;
    p.n_seq_max = n_seq_max;
    p.kv_unified = unified;
    p.threads = 1;
    p.type_v = "bf16";  // attention then depends on the visible cells alone, not on where they lie
    return p;
}

inline std::shared_ptr<kvasir::Context> context(const kvasir::Model &model, const kvasir::ContextParams &p = params()) {
    return std::make_shared<kvasir::Context>(model, p, kvasir::Adapters());
}

inline kvasir::Row row(llama_seq_id seq, llama_pos pos, Tokens tokens,
                       std::shared_ptr<kvasir::Sampler> sampler = nullptr, bool output = false) {
    return {seq, pos, std::move(tokens), std::move(sampler), std::nullopt, output};
}

inline kvasir::Step step(kvasir::Context &context, const std::vector<kvasir::Row> &rows) {
    std::vector<const kvasir::Row *> pointers;
    for (const kvasir::Row &r : rows) {
        pointers.push_back(&r);
    }
    return context.step(pointers);
}

inline Tokens some_tokens(int n) {
    Tokens out;
    for (int i = 0; i < n; ++i) {
        out.push_back(97 + (7 * i * i + 3 * i) % 26);
    }
    return out;
}

inline bool feed(kvasir::Context &context, llama_seq_id seq, const Tokens &tokens, llama_pos pos = 0) {
    return step(context, {row(seq, pos, tokens)}).status == "ok";
}

// The logits after one more token.
inline std::vector<float> probe(kvasir::Context &context, kvasir::Memory &memory, llama_seq_id seq) {
    const llama_pos pos = memory.pos_max(seq).value_or(-1) + 1;
    if (step(context, {row(seq, pos, {120}, nullptr, true)}).status != "ok") return {};
    return context.logits(0);
}

// Logits of a made-up model: n random numbers around 0.
inline std::vector<float> some_logits(int32_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<float> out(static_cast<size_t>(n));
    for (float &x : out) {
        x = normal(random);
    }
    return out;
}

}  // namespace test
