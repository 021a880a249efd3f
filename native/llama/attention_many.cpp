// Attention of many queries: prefill.
//
// ggml unpacks a tile of keys value by value, and its mask too, for every 64 queries of every head. Here they are
// unpacked with vectors, once for all heads that share them; queries that see nothing of a tile are left out of it, and
// those that see all of it never read their mask. A row's sums are the same in whatever company it is computed.
#include "attention_kernels.h"

#ifdef KVASIR_ATTENTION

#include <algorithm>
#include <cmath>

#include "ggml-cpu-impl.h"
#include "vectors.h"

namespace kvasir_attention {
namespace {

constexpr int64_t MOST_ROWS = 192;         // of a unit of work; a row is a query of one head
constexpr int AT_ONCE = 6;                 // rows whose sums fit into registers, beside
constexpr int WIDE = LANES == 16 ? 4 : 2;  // so many vectors of columns

// c = a b, or c += a b, for some rows of a and some vectors of columns of b.
template <int ROWS, int WIDTH, bool ADD>
inline void multiply(const float *const *a, const float *b, int64_t b_stride, int64_t depth, float *const *c,
                     int64_t at) {
    Vec sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; ++r) {
        for (int w = 0; w < WIDTH; ++w) sums[r][w] = ADD ? load(c[r] + at + w * LANES) : zero();
    }
    for (int64_t d = 0; d < depth; ++d) {
        Vec columns[WIDTH];
        for (int w = 0; w < WIDTH; ++w) columns[w] = load(b + d * b_stride + at + w * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const Vec factor = all(a[r][d]);
            for (int w = 0; w < WIDTH; ++w) sums[r][w] = fma(factor, columns[w], sums[r][w]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int w = 0; w < WIDTH; ++w) store(c[r] + at + w * LANES, sums[r][w]);
    }
}

template <int ROWS, bool ADD>
inline void multiply(const float *const *a, const float *b, int64_t n_columns, int64_t depth, float *const *c) {
    int64_t at = 0;
    for (; at + WIDE * LANES <= n_columns; at += WIDE * LANES) multiply<ROWS, WIDE, ADD>(a, b, n_columns, depth, c, at);
    for (; at < n_columns; at += LANES) multiply<ROWS, 1, ADD>(a, b, n_columns, depth, c, at);
}

inline void store_transposed(const __m256 (&in)[8], float *out, int64_t stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(out + i * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

// The keys of a tile as floats: for each dimension, all cells.
void unpack_keys(const char *k, size_t stride, int64_t size, float *out) {
    for (int64_t cell = 0; cell < TILE; cell += 8) {
        for (int64_t d = 0; d < size; d += 8) {
            __m256 rows[8];
            for (int i = 0; i < 8; ++i) {
                const auto *from = reinterpret_cast<const ggml_fp16_t *>(k + (cell + i) * stride) + d;
                rows[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
            }
            store_transposed(rows, out + d * TILE + cell, TILE);
        }
    }
}

// The values of a tile as floats: for each cell, all dimensions.
void unpack_values(const char *v, size_t stride, int64_t size, float *out) {
    for (int64_t cell = 0; cell < TILE; ++cell) {
        const auto *from = reinterpret_cast<const ggml_fp16_t *>(v + cell * stride);
        for (int64_t d = 0; d < size; d += LANES) store(out + cell * size + d, halves(from + d));
    }
}

enum class Sees : uint8_t { none, some, every };

// What a query sees of a tile, by its part of the mask.
inline Sees sees(const ggml_fp16_t *mask) {
    const __m256i hidden = _mm256_set1_epi16(static_cast<int16_t>(0xFC00));  // minus infinity
    __m256i any_bit = _mm256_setzero_si256(), all_hidden = _mm256_set1_epi16(-1);
    for (int64_t i = 0; i < TILE; i += 16) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask + i));
        any_bit = _mm256_or_si256(any_bit, values);
        all_hidden = _mm256_and_si256(all_hidden, _mm256_cmpeq_epi16(values, hidden));
    }
    if (_mm256_testz_si256(any_bit, any_bit)) return Sees::every;
    return _mm256_movemask_epi8(all_hidden) == -1 ? Sees::none : Sees::some;
}

// A row as it is summed: the largest score so far, the sum of weights relative to it, the weighted V.
struct Row {
    const float *query;
    float *sums;
    const ggml_fp16_t *mask;
    float largest, weight;
    Sees seen;
};

// Makes a row's scores of a tile weights, and brings its sums so far to the same scale.
inline void weigh(Row &row, int64_t cell, int64_t size, float *scores) {
    constexpr int WIDTH = TILE / LANES;
    Vec score[WIDTH];
    for (int w = 0; w < WIDTH; ++w) {
        score[w] = load(scores + w * LANES);
        if (row.seen == Sees::some) score[w] = add(score[w], halves(row.mask + cell + w * LANES));
    }
    Vec top = score[0];
    for (int w = 1; w < WIDTH; ++w) top = larger(top, score[w]);
    const float here = most(top);
    if (here > row.largest) {
        const float shrink = std::exp(row.largest - here);
        row.largest = here;
        row.weight *= shrink;
        for (int64_t d = 0; d < size; d += LANES) store(row.sums + d, mul(load(row.sums + d), all(shrink)));
    }
    Vec total = zero();
    for (int w = 0; w < WIDTH; ++w) {
        const Vec weights = exp_of(sub(score[w], all(row.largest)));
        total = add(total, weights);
        store(scores + w * LANES, weights);
    }
    row.weight += sum(total);
}

// What a thread works in.
struct Scratch {
    float *queries, *sums, *keys, *values;

    Scratch(const ggml_compute_params *params, int64_t size) {
        auto at = reinterpret_cast<uintptr_t>(params->wdata) + static_cast<size_t>(params->ith) * bytes(size);
        queries = reinterpret_cast<float *>((at + 63) / 64 * 64);
        sums = queries + MOST_ROWS * size;
        keys = sums + MOST_ROWS * size;
        values = keys + TILE * size;
    }
    static size_t bytes(int64_t size) {
        return static_cast<size_t>(2 * (MOST_ROWS + TILE) * size) * sizeof(float) + 64;
    }
};

// Adds an unpacked tile to some rows.
template <int ROWS>
inline void add_tile(const Scratch &scratch, Row *const *rows, int64_t cell, int64_t size) {
    alignas(64) float scores[ROWS][TILE];
    const float *factors[ROWS];
    float *results[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        factors[r] = rows[r]->query;
        results[r] = scores[r];
    }
    multiply<ROWS, false>(factors, scratch.keys, TILE, size, results);
    for (int r = 0; r < ROWS; ++r) {
        weigh(*rows[r], cell, size, scores[r]);
        factors[r] = scores[r];
        results[r] = rows[r]->sums;
    }
    multiply<ROWS, true>(factors, scratch.values, size, TILE, results);
}

class ManyQueries : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        size = std::max(size, static_cast<size_t>(n_threads) * Scratch::bytes(op->src[0]->ne[0]));
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *q = op->src[0], *k = op->src[1];
        const int64_t n_queries = q->ne[1], n_kv_heads = k->ne[2], n_streams = q->ne[3];
        // As many queries to a unit as its rows allow, but units enough for every thread.
        const int64_t fair = n_queries * n_kv_heads * n_streams / (4 * params->nth) + 1;
        const int64_t n_at_once = std::min(MOST_ROWS / (q->ne[2] / n_kv_heads), std::max<int64_t>(fair, 16));
        const int64_t n_groups = (n_queries + n_at_once - 1) / n_at_once;
        const int64_t n_units = n_groups * n_kv_heads * n_streams;
        const Scratch scratch(params, q->ne[0]);
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        for (int64_t unit = params->ith; unit < n_units; unit = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t first = unit / n_kv_heads % n_groups * n_at_once;
            run(scratch, op, unit / n_kv_heads / n_groups, unit % n_kv_heads, first,
                std::min(n_at_once, n_queries - first));
        }
        return true;
    }

  private:
    // One KV head, and `n` queries from `first` on of all heads that share it.
    static void run(const Scratch &scratch, ggml_tensor *op, int64_t stream, int64_t kv_head, int64_t first,
                    int64_t n) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        const int64_t shared = q->ne[2] / k->ne[2], size = q->ne[0], n_rows = n * shared;
        const char *keys = cells_at(k, stream, kv_head), *values = cells_at(v, stream, kv_head);
        const float scale = param(op, 0);
        Row rows[MOST_ROWS];
        for (int64_t i = 0; i < n_rows; ++i) {
            float *scaled = scratch.queries + i * size, *sums = scratch.sums + i * size;
            const float *given = query_at(op, stream, first + i / shared, kv_head * shared + i % shared);
            std::transform(given, given + size, scaled, [scale](float x) { return x * scale; });
            std::fill(sums, sums + size, 0.0f);
            rows[i] = {scaled, sums, mask_at(op, stream, first + i / shared), NOTHING, 0.0f, Sees::every};
        }
        for (int64_t cell = 0; cell < k->ne[1]; cell += TILE) {
            Row *seeing[MOST_ROWS];
            int64_t n_seeing = 0;
            for (int64_t i = 0; i < n_rows; ++i) {
                Row &row = rows[i];
                if (row.mask) row.seen = i % shared ? rows[i - 1].seen : sees(row.mask + cell);
                if (row.seen != Sees::none) seeing[n_seeing++] = &row;
            }
            if (n_seeing == 0) continue;
            unpack_keys(keys + cell * k->nb[1], k->nb[1], size, scratch.keys);
            unpack_values(values + cell * v->nb[1], v->nb[1], size, scratch.values);
            int64_t i = 0;
            for (; i + AT_ONCE <= n_seeing; i += AT_ONCE) add_tile<AT_ONCE>(scratch, seeing + i, cell, size);
            for (; i + 2 <= n_seeing; i += 2) add_tile<2>(scratch, seeing + i, cell, size);
            for (; i < n_seeing; ++i) add_tile<1>(scratch, seeing + i, cell, size);
        }
        for (int64_t i = 0; i < n_rows; ++i) {
            const float part = rows[i].weight == 0.0f ? 0.0f : 1.0f / rows[i].weight;
            std::transform(rows[i].sums, rows[i].sums + size,
                           result_at(op, stream, first + i / shared, kv_head * shared + i % shared),
                           [part](float x) { return x * part; });
        }
    }
};

}  // namespace

ggml::cpu::tensor_traits &many_queries() {
    static ManyQueries kernel;
    return kernel;
}

}  // namespace kvasir_attention

#endif
