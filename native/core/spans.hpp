// The one file that knows llama.cpp's KV cells from inside: which cell holds which position, and where its rows lie.
//
// llama.cpp's public state calls move whole sequences and wipe their destination. These move any span of rows, in both
// layouts, and append: what a block cache, prefix sharing between streams and un-sharing before a shift need. A row is
// one cell's K or V in one layer. Caches with transposed V (flash attention off) or per-cell extras (M-RoPE) are
// refused.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

class llama_kv_cache;
class llama_memory_recurrent;

namespace kvasir {

// The attention caches and the recurrent part of one context's memory; absent parts are null.
struct Caches {
    llama_kv_cache *base = nullptr;
    llama_kv_cache *window = nullptr;
    llama_memory_recurrent *recurrent = nullptr;
};
Caches caches_of(llama_memory_t memory);

// Cells of `seq` with p0 <= position < p1, in order of position. Positions that are not there are not in the list.
struct Cell {
    llama_pos pos;
    uint32_t index;
};
std::vector<Cell> cells_of(const llama_kv_cache &cache, llama_seq_id seq, llama_pos p0, llama_pos p1);

bool rows_movable(const llama_context *context, const llama_kv_cache &cache);
std::vector<Cell> shared_among(const llama_kv_cache &cache,
                               const std::vector<Cell> &cells);  // those other sequences use too
uint32_t n_used(const llama_kv_cache &cache, uint32_t n_seq_max);
uint32_t n_free(const llama_kv_cache &cache, llama_seq_id seq);
uint32_t n_total(const llama_kv_cache &cache);

// A header naming types and row sizes, then for every layer its K rows and V rows. Identical in both layouts.
size_t rows_bytes(const llama_kv_cache &cache, llama_seq_id seq, size_t n_tokens);
void read_rows(const llama_kv_cache &cache, llama_seq_id seq, const std::vector<Cell> &cells, char *out);

// Appends the rows of `payloads` as positions p0, p0+1, ... of `seq`. False: not enough free cells, nothing changed.
// Raises BadOption where a payload does not fit this cache.
bool append_rows(llama_kv_cache &cache, llama_seq_id seq, llama_pos p0, const std::vector<std::string_view> &payloads);

// Appends copies of src's `cells` to dst at the same positions. False: not enough free cells, nothing changed.
bool copy_rows(llama_kv_cache &cache, llama_seq_id src, llama_seq_id dst, const std::vector<Cell> &cells);

// Moves these cells of `seq` to free ones at the same positions. Only after asking n_free.
void move_cells(llama_kv_cache &cache, llama_seq_id seq, const std::vector<Cell> &cells);

// After a restore of foreign bytes: whether the positions of `seq` can be. Those below 0, which nothing could remove
// any more, are made removable.
bool positions_possible(llama_memory_t memory, llama_seq_id seq);

// Positions a model has a learned vector for; one beyond them reads outside a tensor. No limit where it has none.
int64_t n_positions(const llama_model *model);

// Whether a decode may be cut into ubatches; without causal attention every token must see all others at once.
bool is_causal(const llama_context *context);

// Whether rotating a stored K again by a position difference gives what computing it there would have given.
bool rope_is_relative(const llama_context *context);

// Applies pending shifts and stream copies now instead of at the next decode.
void apply_pending(llama_context *context);

}  // namespace kvasir
