// Text to tokens and back. Reads only; safe from any thread. Keeps its model's weights alive.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llama.h"

namespace kvasir {

struct ModelHandle;

class Vocab {
  public:
    explicit Vocab(std::shared_ptr<ModelHandle> model);

    int32_t n_tokens() const;
    std::string kind() const;
    std::vector<llama_token> tokenize(const std::string &text, bool add_special, bool parse_special) const;
    std::string token_to_bytes(llama_token token, bool special) const;
    std::string detokenize(const std::vector<llama_token> &tokens, bool remove_special, bool unparse_special) const;

    std::string text(llama_token token) const;
    float score(llama_token token) const;
    bool is_eog(llama_token token) const;
    bool is_control(llama_token token) const;
    std::vector<llama_token> eog_tokens() const;
    bool add_bos() const;
    bool add_eos() const;
    bool add_sep() const;

    // A special token by its name ("bos", "eos", ...), or nothing where the vocabulary has none.
    std::optional<llama_token> special(const std::string &name) const;

    void check(llama_token token) const;  // BadOption unless 0 <= token < n_tokens
    void require_text() const;            // TokenizeFailed where the vocabulary has ids and no texts
    const llama_vocab *raw() const { return vocab_; }
    const std::shared_ptr<ModelHandle> &model() const { return model_; }

  private:
    std::shared_ptr<ModelHandle> model_;
    const llama_vocab *vocab_;
};

}  // namespace kvasir
