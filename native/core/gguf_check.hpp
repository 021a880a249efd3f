// Looks at a GGUF's keys before llama.cpp does, because a file that is well formed but impossible trips assertions
// there. Reads no tensor data.
#pragma once

#include <cstdint>
#include <string>

namespace kvasir {

struct GgufFacts {
    std::string architecture, name, file_type;
    int64_t n_tensors = 0, n_kv = 0, context_length = 0, block_count = 0, embedding_length = 0, n_vocab = 0,
            size_bytes = 0;
};

// Raises ModelNotFound or ModelLoadError, each saying what is wrong with which file.
GgufFacts check_gguf(const std::string &path);

}  // namespace kvasir
