// Attention of a few queries: decoding.
//
// ggml visits one position at a time for one head, rounds its sum to F16 at every one of them, and calls libm for each
// weight. Here sixteen positions are weighed at once, the heads that share a K and V read them once, and sums are F32.
//
// The cache is cut into chunks of a fixed size, whatever the number of threads or of queries, and their sums are joined
// in order: a query's result depends on nothing but itself and the cells it sees.
#include "attention_kernels.h"

#ifdef KVASIR_ATTENTION

#include <algorithm>
#include <cmath>

#include "ggml-cpu-impl.h"
#include "vectors.h"

namespace kvasir_attention {
namespace {

constexpr int64_t CHUNK = 512;  // cells a unit of work visits
constexpr int64_t AHEAD = 32;   // cells between what is read and what is asked for

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

// Asks for a cell further on: a head's cells lie too far apart for the CPU to guess. Past the end it does no harm.
template <int WIDTH>
inline void prefetch(const ggml_fp16_t *cell, size_t bytes) {
    const char *at = reinterpret_cast<const char *>(cell) + bytes;
    for (int i = 0; i < WIDTH * LANES * 2; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
}

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
            prefetch<WIDTH>(k, AHEAD * cells.k_stride);
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
            prefetch<WIDTH>(v, AHEAD * cells.v_stride);
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

int64_t n_chunks(const ggml_tensor *op) { return (op->src[1]->ne[1] + CHUNK - 1) / CHUNK; }

class FewQueries : public ggml::cpu::tensor_traits {
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
        // A thread's units follow each other in memory: the heads of a cell lie side by side.
        const int64_t end = n_units * (params->ith + 1) / params->nth;
        for (int64_t unit = n_units * params->ith / params->nth; unit < end; ++unit) {
            const int64_t kv_head = unit % n_kv_heads, chunk = unit / n_kv_heads % chunks;
            const int64_t query = unit / n_kv_heads / chunks % n_queries;
            run(params, op, unit / n_kv_heads / chunks / n_queries, query, kv_head, chunk);
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
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
        const int64_t shared = q->ne[2] / k->ne[2], size = q->ne[0];
        const Cells cells = {cells_at(k, stream, kv_head),
                             cells_at(v, stream, kv_head),
                             k->nb[1],
                             v->nb[1],
                             mask_at(op, stream, query),
                             chunk * CHUNK,
                             std::min((chunk + 1) * CHUNK, k->ne[1])};
        const float *queries[MOST_SHARED];
        Sum sums[MOST_SHARED];
        for (int64_t i = 0; i < shared; ++i) {
            const int64_t head = kv_head * shared + i;
            queries[i] = query_at(op, stream, query, head);
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
            float *out = result_at(op, stream, query, head);
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

}  // namespace

ggml::cpu::tensor_traits &few_queries() {
    static FewQueries kernel;
    return kernel;
}

}  // namespace kvasir_attention

#endif
