// The kernels that attention.cpp chooses from, and what they share.
#pragma once

#if (defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))) && defined(__x86_64__)
#define KVASIR_ATTENTION

#include <cstdint>
#include <cstring>
#include <limits>

#include "ggml.h"
#include "traits.h"

namespace kvasir_attention {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int64_t MOST_SHARED = 32;  // heads that share a KV head, in any model there is
constexpr int64_t TILE = 64;         // cells that `many_queries` takes at once; a cache must be a multiple of it

ggml::cpu::tensor_traits &few_queries();
ggml::cpu::tensor_traits &many_queries();

inline float param(const ggml_tensor *op, int i) {
    float value;
    std::memcpy(&value, reinterpret_cast<const float *>(op->op_params) + i, sizeof(value));
    return value;
}

// Where a query of one head lies, and where its result goes.
inline const float *query_at(const ggml_tensor *op, int64_t stream, int64_t query, int64_t head) {
    const ggml_tensor *q = op->src[0];
    return reinterpret_cast<const float *>(static_cast<const char *>(q->data) + query * q->nb[1] + head * q->nb[2] +
                                           stream * q->nb[3]);
}
inline float *result_at(ggml_tensor *op, int64_t stream, int64_t query, int64_t head) {
    return reinterpret_cast<float *>(static_cast<char *>(op->data) + head * op->nb[1] + query * op->nb[2] +
                                     stream * op->nb[3]);
}

// The first cell of one KV head, and a query's row of the mask, null where there is none.
inline const char *cells_at(const ggml_tensor *kv, int64_t stream, int64_t kv_head) {
    return static_cast<const char *>(kv->data) + kv_head * kv->nb[2] + stream * kv->nb[3];
}
inline const ggml_fp16_t *mask_at(const ggml_tensor *op, int64_t stream, int64_t query) {
    const ggml_tensor *mask = op->src[3];
    if (!mask) return nullptr;
    return reinterpret_cast<const ggml_fp16_t *>(static_cast<const char *>(mask->data) + query * mask->nb[1] +
                                                 stream % mask->ne[3] * mask->nb[3]);
}

}  // namespace kvasir_attention

#endif
