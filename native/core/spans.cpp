#include "spans.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>

#include "error.hpp"
#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-kv-cells.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

namespace kvasir {
namespace {

constexpr uint32_t SPAN_MAGIC = 0x5350564B;  // "KVPS"
constexpr uint32_t SPAN_VERSION = 1;

struct SpanHeader {
    uint32_t magic, version, n_tokens, n_tensors;
};
struct TensorHeader {
    int32_t type;
    uint32_t row_bytes;
};

using GgmlPtr = std::unique_ptr<ggml_context, decltype(&ggml_free)>;

// V has no accessor; a view of its first cell names the storage and shows how it lies.
template <class Visit>
void each_v(const llama_kv_cache &cache, llama_seq_id seq, Visit visit) {
    const std::vector<uint32_t> layers = cache.get_layer_ids();
    const GgmlPtr views(ggml_init({ggml_tensor_overhead() * (layers.size() * 4 + 8), nullptr, true}), &ggml_free);
    llama_kv_cache::slot_info where{};
    where.s0 = where.s1 = cache.get_stream(seq);
    where.resize(1);
    where.strm[0] = static_cast<llama_seq_id>(where.s0);
    where.idxs[0] = {0};
    for (const uint32_t layer : layers) {
        if (ggml_tensor *view = cache.get_v(views.get(), static_cast<int32_t>(layer), 1, where)) visit(view);
    }
}

// Every K tensor, then every V tensor, of the cache's layers: [row, cell, stream].
std::vector<ggml_tensor *> tensors_of(const llama_kv_cache &cache, llama_seq_id seq) {
    std::vector<ggml_tensor *> out;
    for (const uint32_t layer : cache.get_layer_ids()) {
        out.push_back(cache.get_k_storage(static_cast<int32_t>(layer)));
    }
    each_v(cache, seq, [&](ggml_tensor *view) { out.push_back(view->view_src ? view->view_src : view); });
    return out;
}

// Runs of neighbouring cells: one copy each instead of one per row.
template <class Move>
void each_run(const std::vector<uint32_t> &index, Move move) {
    size_t i = 0;
    while (i < index.size()) {
        size_t j = i + 1;
        while (j < index.size() && index[j] == index[j - 1] + 1) {
            ++j;
        }
        move(i, index[i], j - i);
        i = j;
    }
}

// Claims cells for positions of one sequence. Empty: there is no room, and nothing changed.
std::vector<uint32_t> claim(llama_kv_cache &cache, llama_seq_id seq, const std::vector<llama_pos> &positions) {
    llama_batch_allocr allocator(1);
    llama_ubatch ubatch = allocator.ubatch_reserve(static_cast<uint32_t>(positions.size()), 1);
    ubatch.seq_id_unq[0] = seq;
    for (size_t i = 0; i < positions.size(); ++i) {
        ubatch.pos[i] = positions[i];
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i] = &seq;
    }
    const llama_kv_cache::slot_info where = cache.find_slot(ubatch, false);
    if (where.empty()) {
        return {};
    }
    cache.apply_ubatch(where, ubatch);
    return where.idxs[0];
}

// The rows of one payload: `n` tokens, tensor after tensor.
struct Rows {
    const char *data;
    size_t n;
};

// Refuses whatever was not written by read_rows() of a cache like this.
Rows rows_in(std::string_view payload, const std::vector<ggml_tensor *> &tensors) {
    SpanHeader header{};
    const size_t head = sizeof(SpanHeader) + tensors.size() * sizeof(TensorHeader);
    size_t size = head;
    bool fits = payload.size() >= size;
    if (fits) {
        std::memcpy(&header, payload.data(), sizeof(header));
        fits = header.magic == SPAN_MAGIC && header.version == SPAN_VERSION && header.n_tensors == tensors.size();
    }
    for (size_t i = 0; fits && i < tensors.size(); ++i) {
        TensorHeader th{};
        std::memcpy(&th, payload.data() + sizeof(SpanHeader) + i * sizeof(TensorHeader), sizeof(th));
        fits = th.type == static_cast<int32_t>(tensors[i]->type) && th.row_bytes == tensors[i]->nb[1];
        size += size_t(header.n_tokens) * th.row_bytes;
    }
    if (!fits || payload.size() != size) {
        throw Error(Kind::BadOption, "these bytes are not a KV span of this model and these KV types.");
    }
    return {payload.data() + head, header.n_tokens};
}

constexpr size_t MOST_COPY_THREADS = 4;

// Claims cells for `positions` and fills them from `parts`, in order. False: no room, and nothing changed.
bool place_rows(llama_kv_cache &cache, llama_seq_id seq, const std::vector<llama_pos> &positions,
                const std::vector<Rows> &parts) {
    if (positions.empty()) {
        return true;
    }
    const std::vector<uint32_t> index = claim(cache, seq, positions);
    if (index.empty()) {
        return false;
    }
    const size_t stream = cache.get_stream(seq);
    const std::vector<ggml_tensor *> tensors = tensors_of(cache, seq);
    std::vector<std::vector<uint32_t>> to;  // by part
    auto first = index.begin();
    for (const Rows &part : parts) {
        to.emplace_back(first, first + static_cast<ptrdiff_t>(part.n));
        first += static_cast<ptrdiff_t>(part.n);
    }
    const auto fill = [&](size_t p) {
        const char *at = parts[p].data;
        for (ggml_tensor *tensor : tensors) {
            const size_t row = tensor->nb[1];
            each_run(to[p], [&](size_t i, size_t cell, size_t n) {
                ggml_backend_tensor_set(tensor, at + i * row, stream * tensor->nb[2] + cell * row, n * row);
            });
            at += parts[p].n * row;
        }
    };
    // A copy of tens of megabytes waits for memory: two cores have it there in little more than half the time.
    const bool on_host = std::all_of(tensors.begin(), tensors.end(), [](const ggml_tensor *tensor) {
        const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
        return buffer && ggml_backend_buffer_is_host(buffer);
    });
    const size_t n_cores = std::max(1u, std::thread::hardware_concurrency());
    const size_t n_threads = on_host ? std::min({parts.size(), n_cores, MOST_COPY_THREADS}) : 1;
    std::atomic<size_t> next{0};
    const auto work = [&] {
        for (size_t p = next++; p < parts.size(); p = next++) {
            fill(p);
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (size_t i = 1; i < n_threads; ++i) {
            helpers.emplace_back(work);
        }
    } catch (const std::system_error &) {  // no more threads: this one does the rest
    }
    work();
    for (std::thread &helper : helpers) {
        helper.join();
    }
    return true;
}

}  // namespace

Caches caches_of(llama_memory_t memory) {
    Caches out;
    if (auto *plain = dynamic_cast<llama_kv_cache *>(memory)) {
        out.base = plain;
    } else if (auto *iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        out.base = iswa->get_base();
        out.window = iswa->get_swa();
    } else if (auto *recurrent = dynamic_cast<llama_memory_recurrent *>(memory)) {
        out.recurrent = recurrent;
    } else if (auto *hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        out.base = hybrid->get_mem_attn();
        out.recurrent = hybrid->get_mem_recr();
    } else if (auto *both = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        out.base = both->get_mem_attn()->get_base();
        out.window = both->get_mem_attn()->get_swa();
        out.recurrent = both->get_mem_recr();
    }
    return out;
}

std::vector<Cell> cells_of(const llama_kv_cache &cache, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const llama_kv_cells &cells = cache.get_cells(seq);
    std::vector<Cell> out;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq) && cells.pos_get(i) >= p0 && cells.pos_get(i) < p1) {
            out.push_back({cells.pos_get(i), i});
        }
    }
    std::sort(out.begin(), out.end(), [](const Cell &a, const Cell &b) { return a.pos < b.pos; });
    return out;
}

bool rows_movable(const llama_context *context, const llama_kv_cache &cache) {
    // Latent attention keeps no V of its own, and llama.cpp's accessor would look for it.
    if (cache.has_cell_ext() || context->get_model().hparams.is_mla()) {
        return false;
    }
    for (const ggml_tensor *tensor : tensors_of(cache, 0)) {
        if (!ggml_is_contiguous(tensor)) return false;
    }
    // Without flash attention a cell is a column of V, yet the storage has the same shape; only a view's strides tell.
    bool transposed = false;
    each_v(cache, 0, [&](const ggml_tensor *view) { transposed = transposed || view->nb[1] > view->nb[2]; });
    return !transposed;
}

std::vector<Cell> shared_among(const llama_kv_cache &cache, const std::vector<Cell> &cells) {
    std::vector<Cell> out;
    if (cache.get_n_stream() != 1) return out;
    const llama_kv_cells &all = cache.get_cells(0);
    std::copy_if(cells.begin(), cells.end(), std::back_inserter(out),
                 [&](const Cell &c) { return all.seq_count(c.index) > 1; });
    return out;
}

uint32_t n_free(const llama_kv_cache &cache, llama_seq_id seq) {
    return cache.get_size() - cache.get_cells(seq).get_used();
}

uint32_t n_used(const llama_kv_cache &cache, uint32_t n_seq_max) {
    if (cache.get_n_stream() == 1) {
        return cache.get_cells(0).get_used();
    }
    uint32_t n = 0;
    for (uint32_t seq = 0; seq < n_seq_max; ++seq) {
        n += cache.get_cells(static_cast<llama_seq_id>(seq)).get_used();
    }
    return n;
}

uint32_t n_total(const llama_kv_cache &cache) { return cache.get_size() * cache.get_n_stream(); }

size_t rows_bytes(const llama_kv_cache &cache, llama_seq_id seq, size_t n_tokens) {
    const std::vector<ggml_tensor *> tensors = tensors_of(cache, seq);
    size_t size = sizeof(SpanHeader) + tensors.size() * sizeof(TensorHeader);
    for (const ggml_tensor *tensor : tensors) {
        size += n_tokens * tensor->nb[1];
    }
    return size;
}

void read_rows(const llama_kv_cache &cache, llama_seq_id seq, const std::vector<Cell> &cells, char *out) {
    const std::vector<ggml_tensor *> tensors = tensors_of(cache, seq);
    char *at = out;
    const SpanHeader header = {SPAN_MAGIC, SPAN_VERSION, static_cast<uint32_t>(cells.size()),
                               static_cast<uint32_t>(tensors.size())};
    std::memcpy(at, &header, sizeof(header));
    at += sizeof(header);
    for (const ggml_tensor *tensor : tensors) {
        const TensorHeader th = {static_cast<int32_t>(tensor->type), static_cast<uint32_t>(tensor->nb[1])};
        std::memcpy(at, &th, sizeof(th));
        at += sizeof(th);
    }
    std::vector<uint32_t> index;
    for (const Cell &cell : cells) {
        index.push_back(cell.index);
    }
    const size_t stream = cache.get_stream(seq);
    for (ggml_tensor *tensor : tensors) {
        const size_t row = tensor->nb[1];
        each_run(index, [&](size_t i, size_t cell, size_t n) {
            ggml_backend_tensor_get(tensor, at + i * row, stream * tensor->nb[2] + cell * row, n * row);
        });
        at += cells.size() * row;
    }
}

bool append_rows(llama_kv_cache &cache, llama_seq_id seq, llama_pos p0, const std::vector<std::string_view> &payloads) {
    const std::vector<ggml_tensor *> tensors = tensors_of(cache, seq);
    std::vector<Rows> parts;
    size_t n_tokens = 0;
    for (const std::string_view payload : payloads) {
        parts.push_back(rows_in(payload, tensors));
        n_tokens += parts.back().n;
    }
    if (n_tokens > cache.get_size()) {
        return false;
    }
    if (n_tokens > static_cast<size_t>(std::numeric_limits<llama_pos>::max() - p0)) {
        throw Error(Kind::BadOption, "a span of " + std::to_string(n_tokens) + " tokens at " + std::to_string(p0) +
                                         " leaves the range of positions.");
    }
    std::vector<llama_pos> positions(n_tokens);
    std::iota(positions.begin(), positions.end(), p0);
    return place_rows(cache, seq, positions, parts);
}

void move_cells(llama_kv_cache &cache, llama_seq_id seq, const std::vector<Cell> &cells) {
    std::string payload(rows_bytes(cache, seq, cells.size()), '\0');
    read_rows(cache, seq, cells, payload.data());
    std::vector<llama_pos> positions;
    for (const Cell &cell : cells) {
        positions.push_back(cell.pos);
        cache.seq_rm(seq, cell.pos, cell.pos + 1);
    }
    place_rows(cache, seq, positions, {rows_in(payload, tensors_of(cache, seq))});
}

bool copy_rows(llama_kv_cache &cache, llama_seq_id src, llama_seq_id dst, const std::vector<Cell> &cells) {
    if (cells.empty()) {
        return true;
    }
    std::vector<llama_pos> positions;
    std::vector<uint32_t> from;
    for (const Cell &cell : cells) {
        positions.push_back(cell.pos);
        from.push_back(cell.index);
    }
    const std::vector<uint32_t> to = claim(cache, dst, positions);
    if (to.empty()) {
        return false;
    }
    const size_t src_stream = cache.get_stream(src), dst_stream = cache.get_stream(dst);
    std::vector<char> buffer;
    for (ggml_tensor *tensor : tensors_of(cache, src)) {
        const size_t row = tensor->nb[1];
        buffer.resize(cells.size() * row);
        each_run(from, [&](size_t i, size_t cell, size_t n) {
            ggml_backend_tensor_get(tensor, buffer.data() + i * row, src_stream * tensor->nb[2] + cell * row, n * row);
        });
        each_run(to, [&](size_t i, size_t cell, size_t n) {
            ggml_backend_tensor_set(tensor, buffer.data() + i * row, dst_stream * tensor->nb[2] + cell * row, n * row);
        });
    }
    return true;
}

bool positions_possible(llama_memory_t memory, llama_seq_id seq) {
    const Caches caches = caches_of(memory);
    bool possible = true;
    for (llama_kv_cache *cache : {caches.base, caches.window}) {
        if (!cache) continue;
        auto &cells = const_cast<llama_kv_cells &>(cache->get_cells(seq));
        std::vector<uint32_t> below;
        llama_pos last = -1;
        for (const auto &[pos, index] : cells.seq_pos_get(seq)) {
            possible = possible && pos > last;
            last = pos;
            if (pos < 0) below.push_back(index);
        }
        for (const uint32_t index : below) {
            cells.seq_rm(index, seq);
        }
    }
    if (caches.recurrent) {
        for (auto &cell : caches.recurrent->cells) {
            if (cell.pos >= 0 || !cell.has_seq_id(seq)) continue;
            cell.pos = 0;
            possible = false;
        }
    }
    return possible;
}

int64_t n_positions(const llama_model *model) {
    return model->pos_embd ? model->pos_embd->ne[1] : std::numeric_limits<int64_t>::max();
}

bool is_causal(const llama_context *context) { return context->get_cparams().causal_attn; }

bool rope_is_relative(const llama_context *context) {
    const llama_cparams &c = context->get_cparams();
    // YaRN multiplies by a magnitude on every rotation, so a second rotation would scale K twice.
    return c.rope_scaling_type != LLAMA_ROPE_SCALING_TYPE_YARN &&
           c.rope_scaling_type != LLAMA_ROPE_SCALING_TYPE_LONGROPE && c.yarn_ext_factor == 0.0f;
}

void apply_pending(llama_context *context) { context->memory_update(false); }

}  // namespace kvasir
