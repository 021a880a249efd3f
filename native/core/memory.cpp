#include "memory.hpp"

#include <algorithm>
#include <climits>

#include "error.hpp"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "runtime.hpp"
#include "spans.hpp"

namespace kvasir {
namespace {

[[noreturn]] void bad(const std::string &message) { throw Error(Kind::BadOption, message); }

std::string span_text(llama_pos p0, llama_pos p1) {
    return "positions " + std::to_string(p0) + " to " + std::to_string(p1 - 1);
}

llama_kv_cache &cache_for(const llama_context *context, const Caches &caches, const std::string &part) {
    if (part != "base" && part != "window") {
        bad("part is 'base' or 'window', not '" + part + "'.");
    }
    llama_kv_cache *cache = part == "base" ? caches.base : caches.window;
    if (!cache) {
        throw Error(Kind::Unsupported, "this model's memory has no '" + part + "' part whose spans can be moved.");
    }
    if (!rows_movable(context, *cache)) {
        throw Error(Kind::Unsupported,
                    "KV spans of this model cannot be moved: its cells carry more than their position, or V is "
                    "transposed (flash_attn='off').");
    }
    return *cache;
}

}  // namespace

llama_memory_t Memory::raw() {
    llama_memory_t memory = llama_get_memory(context_->raw());
    if (!memory) {
        throw Error(Kind::Unsupported, "this model is an encoder; it has no KV memory.");
    }
    return memory;
}

bool Memory::can_shift() {
    const auto guard = context_->lock();
    return context_->shifts_exactly();
}

uint64_t Memory::n_cells() {
    const auto guard = context_->lock();
    const Caches caches = caches_of(raw());
    return caches.base ? n_total(*caches.base) : static_cast<uint64_t>(context_->params().n_seq_max);
}

uint64_t Memory::used_cells() {
    const auto guard = context_->lock();
    llama_memory_t memory = raw();
    const auto n_seq = static_cast<uint32_t>(context_->params().n_seq_max);
    const Caches caches = caches_of(memory);
    if (caches.base) {
        return n_used(*caches.base, n_seq);
    }
    uint64_t n = 0;
    for (uint32_t seq = 0; seq < n_seq; ++seq) {
        n += llama_memory_seq_pos_max(memory, static_cast<llama_seq_id>(seq)) >= 0 ? 1 : 0;
    }
    return n;
}

std::optional<llama_pos> Memory::pos_min(llama_seq_id seq) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    const llama_pos pos = llama_memory_seq_pos_min(raw(), seq);
    return pos < 0 ? std::nullopt : std::optional<llama_pos>(pos);
}

std::optional<llama_pos> Memory::pos_max(llama_seq_id seq) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    const llama_pos pos = llama_memory_seq_pos_max(raw(), seq);
    return pos < 0 ? std::nullopt : std::optional<llama_pos>(pos);
}

// Whether a sequence cut to n_tokens still holds every position that its next token looks back on.
bool Memory::window_reaches(llama_seq_id seq, llama_pos n_tokens) {
    if (kind() != "window" || n_tokens == 0) {
        return true;
    }
    const llama_pos oldest = llama_memory_seq_pos_min(raw(), seq);
    return oldest >= 0 && oldest <= std::max(0, n_tokens - context_->n_swa() + 1);
}

bool Memory::remove(llama_seq_id seq, llama_pos p0, std::optional<llama_pos> p1) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    llama_memory_t memory = raw();
    const llama_pos end = llama_memory_seq_pos_max(memory, seq) + 1;
    if (p0 < 0 || (p1 && *p1 < p0)) {
        bad("a span begins at 0 or later and does not end before it begins.");
    }
    const llama_pos stop = p1 ? std::min(*p1, end) : end;
    if (p0 == 0 && !p1) {  // also what only one part of the memory holds, after a restore that was given up
        llama_memory_seq_rm(memory, seq, -1, -1);
        return true;
    }
    if (p0 >= stop) {
        return true;
    }
    if (p0 == 0 && stop == end) {
        llama_memory_seq_rm(memory, seq, -1, -1);
        return true;
    }
    // A recurrent state cannot forget; hybrid memory would say yes and keep the old state.
    if (recurrent() || (stop == end && !window_reaches(seq, p0))) {
        return false;
    }
    return llama_memory_seq_rm(memory, seq, p0, stop);
}

bool Memory::share(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens) {
    const auto guard = context_->lock();
    context_->check_seq(src);
    context_->check_seq(dst);
    llama_memory_t memory = raw();
    if (src == dst) {
        bad("a sequence cannot share with itself.");
    }
    const llama_pos have = llama_memory_seq_pos_max(memory, src) + 1;
    if (n_tokens < 0 || n_tokens > have) {
        bad("sequence " + std::to_string(src) + " holds " + std::to_string(have) + " tokens; " +
            std::to_string(n_tokens) + " cannot be shared.");
    }
    llama_memory_seq_rm(memory, dst, -1, -1);
    if (n_tokens == 0) {
        return true;
    }
    if ((recurrent() && n_tokens != have) || !window_reaches(src, n_tokens)) {
        return false;
    }
    bool done = true;
    if (context_->params().kv_unified || kind() == "recurrent") {
        share_cells(src, dst, n_tokens);
    } else {
        with_abort_trap(Kind::Unsupported, "sharing a prefix", [&] { done = share_rows(src, dst, n_tokens); });
    }
    if (!done) {
        llama_memory_seq_rm(memory, dst, -1, -1);
    }
    return done;
}

// Unified layout: cells belong to both from now on.
void Memory::share_cells(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens) {
    const Caches caches = caches_of(raw());
    if (caches.window && !caches.recurrent && !context_->params().swa_full) {
        // A small window reuses cells that left it, but never shared ones: share no more than the next token sees.
        caches.base->seq_cp(src, dst, 0, n_tokens);
        caches.window->seq_cp(src, dst, std::max(0, n_tokens - context_->n_swa() + 1), n_tokens);
        return;
    }
    llama_memory_seq_cp(raw(), src, dst, recurrent() ? -1 : 0, recurrent() ? -1 : n_tokens);
}

// Split layout: a stream per sequence, so sharing copies rows. llama.cpp's own copy moves the whole stream, later.
bool Memory::share_rows(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens) {
    llama_synchronize(context_->raw());
    const Caches caches = caches_of(raw());
    if (!caches.base || !rows_movable(context_->raw(), *caches.base) ||
        (caches.window && !rows_movable(context_->raw(), *caches.window))) {
        return false;
    }
    const std::vector<Cell> cells = cells_of(*caches.base, src, 0, n_tokens);
    if (cells.size() != static_cast<size_t>(n_tokens) || !copy_rows(*caches.base, src, dst, cells)) {
        return false;
    }
    if (caches.window && !copy_rows(*caches.window, src, dst, cells_of(*caches.window, src, 0, n_tokens))) {
        return false;
    }
    if (caches.recurrent) {
        caches.recurrent->seq_cp(src, dst, -1, -1);
    }
    return true;
}

void Memory::copy(llama_seq_id src, llama_seq_id dst) {
    const auto end = pos_max(src);
    if (!share(src, dst, end ? *end + 1 : 0)) {
        throw Error(Kind::Unsupported, "sequence " + std::to_string(src) +
                                           " cannot be copied: there is no room, or its KV cannot be moved.");
    }
}

void Memory::keep(llama_seq_id seq) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    llama_memory_t memory = raw();
    // llama.cpp's seq_keep in split layout drops only within one stream.
    for (llama_seq_id other = 0; other < context_->params().n_seq_max; ++other) {
        if (other != seq) llama_memory_seq_rm(memory, other, -1, -1);
    }
}

void Memory::shift(llama_seq_id seq, llama_pos p0, std::optional<llama_pos> p1, llama_pos delta) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    llama_memory_t memory = raw();
    if (!context_->shifts_exactly()) {
        throw Error(Kind::Unsupported,
                    "this model or these KV types cannot be shifted exactly; read the kept tokens again instead.");
    }
    const llama_pos end = llama_memory_seq_pos_max(memory, seq) + 1;
    const llama_pos stop = p1 ? std::min(*p1, end) : end;
    if (p0 < 0 || int64_t(p0) + delta < 0) {
        bad("a shift of " + std::to_string(delta) + " would move position " + std::to_string(p0) + " below 0.");
    }
    if (delta == 0 || p0 >= stop) {
        return;
    }
    check_shift(seq, p0, stop, delta);
    with_abort_trap(Kind::Unsupported, "shifting positions", [&] {
        unshare(seq, p0, stop);
        llama_memory_seq_add(memory, seq, p0, stop, delta);
    });
    // The rotation of K would otherwise wait for the next decode, and a save before that would be wrong.
    context_->apply_pending();
    context_->forget_outputs();
}

// llama.cpp would let two tokens of a sequence have one position, and lets positions overflow.
void Memory::check_shift(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) {
    const int64_t to0 = int64_t(p0) + delta, to1 = int64_t(p1) + delta;
    if (to1 > INT32_MAX) {
        bad("a shift of " + std::to_string(delta) + " leaves the range of positions.");
    }
    const Caches caches = caches_of(raw());
    for (const llama_kv_cache *cache : {caches.base, caches.window}) {
        if (!cache) continue;
        for (const Cell &cell : cells_of(*cache, seq, static_cast<llama_pos>(to0), static_cast<llama_pos>(to1))) {
            if (cell.pos < p0 || cell.pos >= p1) {
                bad("position " + std::to_string(cell.pos) + " of sequence " + std::to_string(seq) +
                    " is taken; remove it before shifting others there.");
            }
        }
    }
}

// A shift moves cells, and so every sequence that shares them: give this one cells of its own first.
void Memory::unshare(llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const Caches caches = caches_of(raw());
    std::vector<std::pair<llama_kv_cache *, std::vector<Cell>>> moves;
    for (llama_kv_cache *cache : {caches.base, caches.window}) {
        if (!cache) continue;
        std::vector<Cell> shared = shared_among(*cache, cells_of(*cache, seq, p0, p1));
        if (shared.empty()) continue;
        if (!rows_movable(context_->raw(), *cache)) {
            throw Error(Kind::Unsupported,
                        "shared KV of this model cannot be separated; read the kept tokens again instead.");
        }
        if (shared.size() > n_free(*cache, seq)) {
            throw Error(Kind::Unsupported,
                        "there is no room to separate shared KV before a shift; free a sequence first.");
        }
        moves.emplace_back(cache, std::move(shared));
    }
    llama_synchronize(context_->raw());
    for (const auto &[cache, cells] : moves) {
        move_cells(*cache, seq, cells);
    }
}

void Memory::clear() {
    const auto guard = context_->lock();
    llama_memory_clear(raw(), true);
    context_->forget_outputs();
}

void Memory::flush() {
    const auto guard = context_->lock();
    raw();
    context_->apply_pending();
}

size_t Memory::span_bytes(llama_pos p0, llama_pos p1, const std::string &part) {
    const auto guard = context_->lock();
    size_t size = 0;
    with_abort_trap(Kind::Unsupported, "exporting KV", [&] {
        const llama_kv_cache &cache = cache_for(context_->raw(), caches_of(raw()), part);
        if (p0 < 0 || p1 <= p0) bad("a span begins at 0 or later and ends after it begins.");
        if (static_cast<uint32_t>(p1 - p0) > cache.get_size()) {
            bad("there is no room for all of " + span_text(p0, p1) + " in the '" + part + "' part of this memory.");
        }
        size = rows_bytes(cache, 0, static_cast<size_t>(p1 - p0));
    });
    return size;
}

void Memory::export_span(llama_seq_id seq, llama_pos p0, llama_pos p1, const std::string &part, char *out) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    with_abort_trap(Kind::Unsupported, "exporting KV", [&] {
        const llama_kv_cache &cache = cache_for(context_->raw(), caches_of(raw()), part);
        const std::vector<Cell> cells = cells_of(cache, seq, p0, p1);
        if (cells.size() != static_cast<size_t>(p1 - p0)) {
            bad("sequence " + std::to_string(seq) + " does not hold all of " + span_text(p0, p1) + " in its '" + part +
                "' part.");
        }
        llama_synchronize(context_->raw());
        read_rows(cache, seq, cells, out);
    });
}

std::string Memory::export_span(llama_seq_id seq, llama_pos p0, llama_pos p1, const std::string &part) {
    std::string out(span_bytes(p0, p1, part), '\0');
    export_span(seq, p0, p1, part, out.data());
    return out;
}

bool Memory::import_span(llama_seq_id seq, llama_pos p0, const std::vector<std::string_view> &payloads,
                         const std::string &part) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    bool done = false;
    with_abort_trap(Kind::Unsupported, "importing KV", [&] {
        llama_kv_cache &cache = cache_for(context_->raw(), caches_of(raw()), part);
        const llama_pos end = cache.seq_pos_max(seq) + 1;
        // The window part of a sequence begins wherever its window does; everything else must continue what is there.
        if (p0 < 0 || (end != p0 && !(part == "window" && end == 0))) {
            bad("sequence " + std::to_string(seq) + " holds " + std::to_string(end) + " tokens in its '" + part +
                "' part; a span at " + std::to_string(p0) + " does not continue it.");
        }
        llama_synchronize(context_->raw());
        done = append_rows(cache, seq, p0, payloads);
        context_->forget_outputs();
    });
    return done;
}

std::string Memory::state(llama_seq_id seq, bool partial) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    raw();
    llama_context *context = context_->raw();
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    std::string out;
    with_abort_trap(Kind::Unsupported, "saving a sequence", [&] {
        out.resize(llama_state_seq_get_size_ext(context, seq, flags));
        const size_t n =
            llama_state_seq_get_data_ext(context, reinterpret_cast<uint8_t *>(out.data()), out.size(), seq, flags);
        if (n != out.size()) throw Error(Kind::Unsupported, "llama.cpp could not save this sequence.");
    });
    return out;
}

bool Memory::set_state(llama_seq_id seq, const std::string &data, bool partial) {
    const auto guard = context_->lock();
    context_->check_seq(seq);
    llama_memory_t memory = raw();
    const llama_state_seq_flags flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    size_t n = 0;
    try {
        with_abort_trap(Kind::BadOption, "restoring a sequence", [&] {
            n = llama_state_seq_set_data_ext(context_->raw(), reinterpret_cast<const uint8_t *>(data.data()),
                                             data.size(), seq, flags);
        });
    } catch (const Error &) {
        n = 0;
    }
    context_->forget_outputs();
    const bool possible = positions_possible(memory, seq);
    if (n == data.size() && n > 0 && possible) {
        return true;
    }
    // A failed restore may claim cells that were never written.
    llama_memory_seq_rm(memory, seq, -1, -1);
    return false;
}

}  // namespace kvasir
