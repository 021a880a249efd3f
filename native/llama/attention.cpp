// Flash attention for decoding, F16 keys and values, on AVX2 and AVX-512.
//
// ggml visits one position at a time for one head, rounds its sum to F16 at every one of them, and calls libm for each
// weight. Decoding many streams at some depth, that is most of a tick. Here sixteen positions are weighed at once, the
// heads that share a K and V read them once, and sums are F32. Other shapes and types are left to ggml.
//
// The cache is cut into chunks of a fixed size, whatever the number of threads or of queries, and their sums are joined
// in order: a query's result depends on nothing but itself and the cells it sees.
//
// It is compiled into ggml's CPU archive, with its flags, and hooks in as ggml's own AMX and repacked kernels do: an
// "extra buffer type" that holds nothing is asked before every operation. Programs that do not call
// `kvasir_use_attention` run ggml's own.
#include "attention.h"

#if (defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))) && defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>

#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "traits.h"

namespace {

constexpr int64_t CHUNK = 512;        // cells a unit of work visits
constexpr int64_t MOST_QUERIES = 63;  // of one stream; from 64 on ggml works in tiles
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec halves(const ggml_fp16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_two_to(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec where_not_below(Vec x, float least, Vec value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_GE_OQ), value);
}
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float most(Vec x) { return _mm512_reduce_max_ps(x); }

#else

constexpr int LANES = 8;
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec halves(const ggml_fp16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_two_to(Vec x, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(x, _mm256_castsi256_ps(exponent));
}
inline Vec where_not_below(Vec x, float least, Vec value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_GE_OQ), value);
}
inline float sum(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float most(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

// e^x for x <= 0, to about one unit in the last place; 0 below -87, where a float would be denormal.
inline Vec exp_of(Vec x) {
    constexpr float least = -87.0f;
    const Vec n = nearest(mul(x, all(1.44269504f)));
    Vec r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Vec y = all(1.9875691500e-4f);
    y = fma(y, r, all(1.3981999507e-3f));
    y = fma(y, r, all(8.3334519073e-3f));
    y = fma(y, r, all(4.1665795894e-2f));
    y = fma(y, r, all(1.6666665459e-1f));
    y = fma(y, r, all(5.0000001201e-1f));
    y = add(fma(mul(r, r), y, r), all(1.0f));
    return where_not_below(x, least, times_two_to(y, n));
}

// One query's sum over some cells: the largest score, the sum of weights relative to it, the weighted V.
struct Sum {
    float largest;
    float weight;
    float *values;
};

// What one unit of work reads: the cells of one KV head.
struct Cells {
    const char *k, *v;
    size_t k_stride, v_stride;  // bytes from cell to cell
    const ggml_fp16_t *mask;    // of this query; null where it sees all
    int64_t begin, end;
};

// Adds the cells to the sums of `HEADS` heads that share them. `WIDTH` vectors make a head.
template <int WIDTH, int HEADS>
void visit(const Cells &cells, const float *const *queries, float scale, Sum *sums) {
    Vec total[HEADS][WIDTH];
    float largest[HEADS], weight[HEADS];
    for (int h = 0; h < HEADS; ++h) {
        largest[h] = NOTHING;
        weight[h] = 0.0f;
        for (int w = 0; w < WIDTH; ++w) total[h][w] = zero();
    }
    for (int64_t at = cells.begin; at < cells.end; at += LANES) {
        const Vec mask = cells.mask ? halves(cells.mask + at) : zero();
        if (most(mask) == NOTHING) continue;  // cells of other sequences, or none
        float scores[HEADS][LANES];
        for (int i = 0; i < LANES; ++i) {
            const auto *k = reinterpret_cast<const ggml_fp16_t *>(cells.k + (at + i) * cells.k_stride);
            Vec key[WIDTH];
            for (int w = 0; w < WIDTH; ++w) key[w] = halves(k + w * LANES);
            for (int h = 0; h < HEADS; ++h) {
                Vec dot = mul(key[0], load(queries[h]));
                for (int w = 1; w < WIDTH; ++w) dot = fma(key[w], load(queries[h] + w * LANES), dot);
                scores[h][i] = sum(dot);
            }
        }
        float weights[HEADS][LANES];
        for (int h = 0; h < HEADS; ++h) {
            const Vec score = fma(load(scores[h]), all(scale), mask);
            const float here = most(score);
            if (here > largest[h]) {
                const float shrink = std::exp(largest[h] - here);
                largest[h] = here;
                weight[h] *= shrink;
                for (int w = 0; w < WIDTH; ++w) total[h][w] = mul(total[h][w], all(shrink));
            }
            const Vec weighed = exp_of(sub(score, all(largest[h])));
            weight[h] += sum(weighed);
            store(weights[h], weighed);
        }
        for (int i = 0; i < LANES; ++i) {
            const auto *v = reinterpret_cast<const ggml_fp16_t *>(cells.v + (at + i) * cells.v_stride);
            for (int w = 0; w < WIDTH; ++w) {
                const Vec value = halves(v + w * LANES);
                for (int h = 0; h < HEADS; ++h) total[h][w] = fma(value, all(weights[h][i]), total[h][w]);
            }
        }
    }
    for (int h = 0; h < HEADS; ++h) {
        sums[h].largest = largest[h];
        sums[h].weight = weight[h];
        for (int w = 0; w < WIDTH; ++w) store(sums[h].values + w * LANES, total[h][w]);
    }
}

// As many heads at once as their sums fit into registers.
template <int WIDTH>
void visit_heads(const Cells &cells, const float *const *queries, float scale, Sum *sums, int64_t n_heads) {
    constexpr int64_t most_heads = std::max(1, 12 / WIDTH);
    for (int64_t h = 0; h < n_heads;) {
        const int64_t left = std::min(n_heads - h, most_heads);
        if constexpr (most_heads >= 4) {
            if (left >= 4) {
                visit<WIDTH, 4>(cells, queries + h, scale, sums + h);
                h += 4;
                continue;
            }
        }
        if constexpr (most_heads >= 3) {
            if (left == 3) {
                visit<WIDTH, 3>(cells, queries + h, scale, sums + h);
                h += 3;
                continue;
            }
        }
        if constexpr (most_heads >= 2) {
            if (left >= 2) {
                visit<WIDTH, 2>(cells, queries + h, scale, sums + h);
                h += 2;
                continue;
            }
        }
        visit<WIDTH, 1>(cells, queries + h, scale, sums + h);
        h += 1;
    }
}

using Visit = void (*)(const Cells &, const float *const *, float, Sum *, int64_t);

Visit visit_of(int64_t head_size) {
    switch (head_size) {
        case 32:
            return visit_heads<32 / LANES>;
        case 64:
            return visit_heads<64 / LANES>;
        case 80:
            return visit_heads<80 / LANES>;
        case 96:
            return visit_heads<96 / LANES>;
        case 112:
            return visit_heads<112 / LANES>;
        case 128:
            return visit_heads<128 / LANES>;
        case 256:
            return visit_heads<256 / LANES>;
        default:
            return nullptr;
    }
}

float param(const ggml_tensor *op, int i) {
    float value;
    std::memcpy(&value, reinterpret_cast<const float *>(op->op_params) + i, sizeof(value));
    return value;
}

int64_t n_chunks(const ggml_tensor *op) { return (op->src[1]->ne[1] + CHUNK - 1) / CHUNK; }

constexpr int64_t MOST_SHARED = 32;  // heads that share a KV head, in any model there is

bool is_ours(const ggml_tensor *op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const float max_bias = param(op, 1), softcap = param(op, 2);
    return !sinks && max_bias == 0.0f && softcap == 0.0f && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 &&
           v->type == GGML_TYPE_F16 && k->ne[0] == v->ne[0] && visit_of(k->ne[0]) && q->ne[1] <= MOST_QUERIES &&
           k->ne[1] % 16 == 0 && (!mask || mask->type == GGML_TYPE_F16) && k->ne[2] == v->ne[2] &&
           k->ne[3] == v->ne[3] && k->ne[3] == q->ne[3] && q->ne[2] / k->ne[2] <= MOST_SHARED &&
           q->nb[0] == sizeof(float) && k->nb[0] == sizeof(ggml_fp16_t) && v->nb[0] == sizeof(ggml_fp16_t);
}

class Attention : public ggml::cpu::tensor_traits {
  public:
    // Of every query head and chunk: its values, its largest score, its weight.
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        const ggml_tensor *q = op->src[0];
        const size_t n_sums = static_cast<size_t>(q->ne[1] * q->ne[2] * q->ne[3] * n_chunks(op));
        size = std::max(size, n_sums * static_cast<size_t>(q->ne[0] + 2) * sizeof(float));
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *q = op->src[0], *k = op->src[1];
        const int64_t n_kv_heads = k->ne[2], n_queries = q->ne[1], n_streams = q->ne[3], chunks = n_chunks(op);
        const int64_t n_units = n_streams * n_queries * n_kv_heads * chunks;
        for (int64_t unit = params->ith; unit < n_units; unit += params->nth) {
            const int64_t chunk = unit % chunks, kv_head = unit / chunks % n_kv_heads;
            const int64_t query = unit / chunks / n_kv_heads % n_queries;
            run(params, op, unit / chunks / n_kv_heads / n_queries, query, kv_head, chunk);
        }
        ggml_barrier(params->threadpool);
        join(params, op);
        return true;
    }

  private:
    static float *sum_at(const ggml_compute_params *params, const ggml_tensor *op, int64_t stream, int64_t query,
                         int64_t head, int64_t chunk) {
        const ggml_tensor *q = op->src[0];
        const int64_t index = ((stream * q->ne[1] + query) * q->ne[2] + head) * n_chunks(op) + chunk;
        return static_cast<float *>(params->wdata) + index * (q->ne[0] + 2);
    }

    static void run(const ggml_compute_params *params, const ggml_tensor *op, int64_t stream, int64_t query,
                    int64_t kv_head, int64_t chunk) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        const int64_t shared = q->ne[2] / k->ne[2], size = q->ne[0];
        Cells cells = {static_cast<const char *>(k->data) + kv_head * k->nb[2] + stream * k->nb[3],
                       static_cast<const char *>(v->data) + kv_head * v->nb[2] + stream * v->nb[3],
                       k->nb[1],
                       v->nb[1],
                       nullptr,
                       chunk * CHUNK,
                       std::min((chunk + 1) * CHUNK, k->ne[1])};
        if (mask) {
            cells.mask = reinterpret_cast<const ggml_fp16_t *>(
                static_cast<const char *>(mask->data) + query * mask->nb[1] + stream % mask->ne[3] * mask->nb[3]);
        }
        const float *queries[MOST_SHARED];
        Sum sums[MOST_SHARED];
        for (int64_t i = 0; i < shared; ++i) {
            const int64_t head = kv_head * shared + i;
            queries[i] = reinterpret_cast<const float *>(static_cast<const char *>(q->data) + query * q->nb[1] +
                                                         head * q->nb[2] + stream * q->nb[3]);
            sums[i].values = sum_at(params, op, stream, query, head, chunk);
        }
        visit_of(size)(cells, queries, param(op, 0), sums, shared);
        for (int64_t i = 0; i < shared; ++i) {
            sums[i].values[size] = sums[i].largest;
            sums[i].values[size + 1] = sums[i].weight;
        }
    }

    // Joins the chunks of every query head, first to last.
    static void join(const ggml_compute_params *params, ggml_tensor *op) {
        const ggml_tensor *q = op->src[0];
        const int64_t size = q->ne[0], n_heads = q->ne[2], n_queries = q->ne[1], chunks = n_chunks(op);
        const int64_t n_rows = n_heads * n_queries * q->ne[3];
        for (int64_t row = params->ith; row < n_rows; row += params->nth) {
            const int64_t head = row % n_heads, query = row / n_heads % n_queries, stream = row / n_heads / n_queries;
            const float *first = sum_at(params, op, stream, query, head, 0);
            float largest = NOTHING;
            for (int64_t c = 0; c < chunks; ++c) largest = std::max(largest, first[c * (size + 2) + size]);
            auto *out = reinterpret_cast<float *>(static_cast<char *>(op->data) + head * op->nb[1] + query * op->nb[2] +
                                                  stream * op->nb[3]);
            std::fill(out, out + size, 0.0f);
            float weight = 0.0f;
            for (int64_t c = 0; c < chunks; ++c) {
                const float *part = first + c * (size + 2);
                if (part[size] == NOTHING) continue;
                const float shrink = std::exp(part[size] - largest);
                weight += part[size + 1] * shrink;
                for (int64_t d = 0; d < size; ++d) out[d] += part[d] * shrink;
            }
            const float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
            for (int64_t d = 0; d < size; ++d) out[d] *= scale;
        }
    }
};

class AttentionType : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        return is_ours(op) ? &attention_ : nullptr;
    }

  private:
    Attention attention_;
};

}  // namespace

void kvasir_use_attention(void) {
    static std::once_flag once;
    std::call_once(once, [] {
        // The list of types that weights may be kept in is made on first use: before ours is among them.
        ggml_backend_reg_t reg = ggml_backend_cpu_reg();
        auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
        if (!get || !get(ggml_backend_reg_dev_get(reg, 0))) return;
        static AttentionType type;
        static ggml_backend_buffer_type holds_nothing = {};
        holds_nothing.context = &type;
        ggml_backend_cpu_get_extra_buffer_types().push_back(&holds_nothing);
    });
}

#else

void kvasir_use_attention(void) {}

#endif
