#include "vocab.hpp"

#include <climits>
#include <map>

#include "error.hpp"
#include "model.hpp"
#include "runtime.hpp"

namespace kvasir {
namespace {

constexpr size_t MAX_DETOKENIZE = size_t(1) << 24;  // llama.cpp counts the bytes of the text in 32 bits

// Length of the character at `at`, 0 where the bytes are no UTF-8 (overlong, surrogate, cut short, out of range).
size_t utf8_length(const std::string &text, size_t at) {
    const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
    const unsigned first = byte(0);
    if (first < 0x80) return 1;
    const size_t n = first >= 0xC2 && first < 0xE0   ? 2
                     : first >= 0xE0 && first < 0xF0 ? 3
                     : first >= 0xF0 && first < 0xF5 ? 4
                                                     : 0;
    for (size_t i = 1; i < n; ++i) {
        if ((byte(i) & 0xC0) != 0x80) return 0;
    }
    const bool wrong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
                       (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F);
    return wrong ? 0 : n;
}

void check_utf8(const std::string &text) {
    for (size_t at = 0; at < text.size();) {
        const size_t n = utf8_length(text, at);
        if (n == 0) {
            throw Error(Kind::TokenizeFailed,
                        "the text is not UTF-8 at byte " + std::to_string(at) + "; decode it first.");
        }
        at += n;
    }
}

}  // namespace

Vocab::Vocab(std::shared_ptr<ModelHandle> model)
    : model_(std::move(model)), vocab_(llama_model_get_vocab(model_->model)) {}

int32_t Vocab::n_tokens() const { return llama_vocab_n_tokens(vocab_); }

std::string Vocab::kind() const {
    switch (llama_vocab_type(vocab_)) {
        case LLAMA_VOCAB_TYPE_SPM:
            return "spm";
        case LLAMA_VOCAB_TYPE_BPE:
            return "bpe";
        case LLAMA_VOCAB_TYPE_WPM:
            return "wpm";
        case LLAMA_VOCAB_TYPE_UGM:
            return "ugm";
        case LLAMA_VOCAB_TYPE_RWKV:
            return "rwkv";
        case LLAMA_VOCAB_TYPE_PLAMO2:
            return "plamo2";
        case LLAMA_VOCAB_TYPE_TEST:
            return "test";
        default:
            return "none";
    }
}

void Vocab::check(llama_token token) const {
    if (token < 0 || token >= n_tokens()) {
        throw Error(Kind::BadOption, "token id " + std::to_string(token) +
                                         " is outside this vocabulary, which has ids 0 to " +
                                         std::to_string(n_tokens() - 1) + ".");
    }
}

void Vocab::require_text() const {
    if (llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_NONE) {
        throw Error(Kind::TokenizeFailed, "this model has no tokenizer; give token ids instead of text.");
    }
}

std::vector<llama_token> Vocab::tokenize(const std::string &text, bool add_special, bool parse_special) const {
    require_text();
    if (text.size() > INT_MAX / 2) {
        throw Error(Kind::TokenizeFailed,
                    "the text is " + std::to_string(text.size()) + " bytes; at most 1 GiB can be tokenized.");
    }
    check_utf8(text);
    std::vector<llama_token> tokens(text.size() + 2);
    with_abort_trap(Kind::TokenizeFailed, "tokenizing", [&] {
        try {
            const auto len = static_cast<int32_t>(text.size());
            int32_t n = llama_tokenize(vocab_, text.data(), len, tokens.data(), static_cast<int32_t>(tokens.size()),
                                       add_special, parse_special);
            if (n < 0 && n != INT32_MIN) {
                tokens.resize(static_cast<size_t>(-n));
                n = llama_tokenize(vocab_, text.data(), len, tokens.data(), static_cast<int32_t>(tokens.size()),
                                   add_special, parse_special);
            }
            if (n < 0) {
                throw Error(Kind::TokenizeFailed, "the text is too long to be tokenized.");
            }
            tokens.resize(static_cast<size_t>(n));
        } catch (const Error &) {
            throw;
        } catch (const std::exception &e) {
            throw Error(Kind::TokenizeFailed, std::string("the tokenizer refused this text: ") + e.what());
        }
    });
    return tokens;
}

std::string Vocab::token_to_bytes(llama_token token, bool special) const {
    require_text();
    check(token);
    std::string piece(32, '\0');
    int32_t n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
    if (n < 0) {
        piece.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
    }
    piece.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return piece;
}

std::string Vocab::detokenize(const std::vector<llama_token> &tokens, bool remove_special, bool unparse_special) const {
    require_text();
    if (tokens.size() > MAX_DETOKENIZE) {
        throw Error(Kind::BadOption,
                    std::to_string(tokens.size()) + " tokens are too many to be turned into text at once.");
    }
    for (const llama_token token : tokens) {
        check(token);
    }
    const auto n_tokens = static_cast<int32_t>(tokens.size());
    std::string text(tokens.size() * 8 + 16, '\0');
    int32_t n = llama_detokenize(vocab_, tokens.data(), n_tokens, text.data(), static_cast<int32_t>(text.size()),
                                 remove_special, unparse_special);
    if (n < 0) {
        text.resize(static_cast<size_t>(-n));
        n = llama_detokenize(vocab_, tokens.data(), n_tokens, text.data(), static_cast<int32_t>(text.size()),
                             remove_special, unparse_special);
    }
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
}

std::string Vocab::text(llama_token token) const {
    require_text();
    check(token);
    const char *text = llama_vocab_get_text(vocab_, token);
    return text ? text : "";
}

float Vocab::score(llama_token token) const {
    require_text();
    check(token);
    return llama_vocab_get_score(vocab_, token);
}

bool Vocab::is_eog(llama_token token) const {
    check(token);
    return llama_vocab_is_eog(vocab_, token);
}

bool Vocab::is_control(llama_token token) const {
    require_text();
    check(token);
    return llama_vocab_is_control(vocab_, token);
}

std::vector<llama_token> Vocab::eog_tokens() const {
    std::vector<llama_token> out;
    for (llama_token token = 0; token < n_tokens(); ++token) {
        if (llama_vocab_is_eog(vocab_, token)) {
            out.push_back(token);
        }
    }
    return out;
}

bool Vocab::add_bos() const { return llama_vocab_get_add_bos(vocab_); }
bool Vocab::add_eos() const { return llama_vocab_get_add_eos(vocab_); }
bool Vocab::add_sep() const { return llama_vocab_get_add_sep(vocab_); }

std::optional<llama_token> Vocab::special(const std::string &name) const {
    using Getter = llama_token (*)(const llama_vocab *);
    static const std::map<std::string, Getter> getters = {
        {"bos", llama_vocab_bos},         {"eos", llama_vocab_eos},         {"eot", llama_vocab_eot},
        {"sep", llama_vocab_sep},         {"nl", llama_vocab_nl},           {"pad", llama_vocab_pad},
        {"mask", llama_vocab_mask},       {"fim_pre", llama_vocab_fim_pre}, {"fim_suf", llama_vocab_fim_suf},
        {"fim_mid", llama_vocab_fim_mid},
    };
    const llama_token token = getters.at(name)(vocab_);
    return token == LLAMA_TOKEN_NULL ? std::nullopt : std::optional<llama_token>(token);
}

}  // namespace kvasir
