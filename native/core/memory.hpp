// A context's KV memory: sequences, their positions, and their bytes.
//
// Closes llama.cpp's silent traps: a call either does exactly what its name says or says that it cannot, and nothing is
// left pending between calls. Positions are half open, [p0, p1); p1 absent means the end.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "context.hpp"

namespace kvasir {

class Memory {
  public:
    explicit Memory(std::shared_ptr<Context> context) : context_(std::move(context)) {}

    std::string kind() const { return context_->memory_kind(); }
    int32_t window() const { return context_->n_swa(); }
    bool can_shift();
    uint64_t n_cells();
    uint64_t used_cells();

    std::optional<llama_pos> pos_min(llama_seq_id seq);
    std::optional<llama_pos> pos_max(llama_seq_id seq);

    bool remove(llama_seq_id seq, llama_pos p0, std::optional<llama_pos> p1);
    bool share(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens);
    void copy(llama_seq_id src, llama_seq_id dst);
    void keep(llama_seq_id seq);
    void shift(llama_seq_id seq, llama_pos p0, std::optional<llama_pos> p1, llama_pos delta);
    void clear();
    void flush();

    // Into room of exactly span_bytes(), which the caller owns: a copy less than the one below.
    size_t span_bytes(llama_pos p0, llama_pos p1, const std::string &part);
    void export_span(llama_seq_id seq, llama_pos p0, llama_pos p1, const std::string &part, char *out);
    std::string export_span(llama_seq_id seq, llama_pos p0, llama_pos p1, const std::string &part);
    bool import_span(llama_seq_id seq, llama_pos p0, const std::vector<std::string_view> &payloads,
                     const std::string &part);
    std::string state(llama_seq_id seq, bool partial);
    bool set_state(llama_seq_id seq, const std::string &data, bool partial);

  private:
    llama_memory_t raw();
    bool recurrent() const { return kind() == "recurrent" || kind() == "hybrid"; }
    bool window_reaches(llama_seq_id seq, llama_pos n_tokens);
    void share_cells(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens);
    bool share_rows(llama_seq_id src, llama_seq_id dst, llama_pos n_tokens);
    void check_shift(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta);
    void unshare(llama_seq_id seq, llama_pos p0, llama_pos p1);

    std::shared_ptr<Context> context_;
};

}  // namespace kvasir
