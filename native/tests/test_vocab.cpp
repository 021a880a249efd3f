// Vocabularies: every kind llama.cpp ships, on bytes no text would hold.
#include <filesystem>

#include "core/model.hpp"
#include "harness.hpp"
#include "rig.hpp"

namespace {

std::vector<std::string> vocabularies() {
    std::vector<std::string> out;
    for (const auto &entry : std::filesystem::directory_iterator(KVASIR_TEST_MODELS)) {
        if (entry.path().extension() == ".gguf") out.push_back(entry.path().string());
    }
    return out;
}

std::unique_ptr<kvasir::Model> vocabulary(const std::string &path) {
    kvasir::ModelParams p;
    p.vocab_only = true;
    return kvasir::Model::load(path, p);
}

std::vector<std::string> odd_texts() {
    std::vector<std::string> out = {"",
                                    std::string(1, '\0'),
                                    std::string("a\0b", 3),
                                    "\xff",
                                    "\xc3",
                                    "\xe2\x82",
                                    "\xf0\x9f\x98",
                                    "\xed\xa0\x80",
                                    "\xf8\x88\x80\x80\x80",
                                    "\xc0\x80",
                                    "<|im_start|><|im_end|></s><s>",
                                    "\r\n\t \v\f",
                                    "\xef\xbb\xbf",
                                    "\xe2\x80\xae",
                                    "e\xcc\x81\xcc\x81\xcc\x81",
                                    "\xf4\x90\x80\x80",
                                    std::string(3000, ' '),
                                    std::string(3000, 'a'),
                                    std::string(3000, '\n'),
                                    std::string(3000, '\x80')};
    std::mt19937 random(3);
    for (int i = 0; i < 40; ++i) {
        std::string text(random() % 60, ' ');
        for (char &c : text) {
            c = static_cast<char>(random());
        }
        out.push_back(text);
    }
    return out;
}

}  // namespace

TEST(odd_bytes_are_tokenized_or_refused_by_every_vocabulary) {
    const auto texts = odd_texts();
    for (const std::string &path : vocabularies()) {
        const auto model = vocabulary(path);
        const kvasir::Vocab vocab = model->vocab();
        for (const std::string &text : texts) {
            for (const bool parse : {false, true}) {
                try {
                    const auto tokens = vocab.tokenize(text, !parse, parse);
                    for (const bool remove : {false, true}) {
                        vocab.detokenize(tokens, remove, !remove);
                    }
                } catch (const kvasir::Error &e) {
                    EXPECT(e.kind == kvasir::Kind::TokenizeFailed);
                }
            }
        }
    }
}

TEST(ids_outside_a_vocabulary_are_refused) {
    for (const std::string &path : vocabularies()) {
        const auto model = vocabulary(path);
        const kvasir::Vocab vocab = model->vocab();
        for (const llama_token token : {-1, INT32_MIN, vocab.n_tokens(), INT32_MAX}) {
            REFUSED(BadOption, vocab.token_to_bytes(token, false));
            REFUSED(BadOption, vocab.detokenize({token}, false, false));
            REFUSED(BadOption, vocab.text(token));
            REFUSED(BadOption, vocab.score(token));
            REFUSED(BadOption, vocab.is_eog(token));
            REFUSED(BadOption, vocab.is_control(token));
        }
        for (llama_token token = 0; token < vocab.n_tokens(); token += 97) {
            vocab.token_to_bytes(token, true);
            vocab.text(token);
            EXPECT(vocab.is_eog(token) ? !vocab.eog_tokens().empty() : true);
        }
        for (const char *name : {"bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid"}) {
            const auto id = vocab.special(name);
            EXPECT(!id || (*id >= 0 && *id < vocab.n_tokens()));
        }
    }
}

TEST(bytes_come_back_from_a_byte_level_vocabulary) {
    const auto model = test::load();
    const kvasir::Vocab vocab = model->vocab();
    for (const std::string &text : odd_texts()) {
        std::vector<llama_token> tokens;
        try {
            tokens = vocab.tokenize(text, false, false);
        } catch (const kvasir::Error &e) {
            EXPECT(e.kind == kvasir::Kind::TokenizeFailed);  // bytes that are no text
        }
        const std::string back = vocab.detokenize(tokens, false, false);
        std::string pieces;
        for (const llama_token token : tokens) {
            pieces += vocab.token_to_bytes(token, false);
        }
        EXPECT(back.size() == pieces.size());
    }
    EXPECT(vocab.detokenize(vocab.tokenize("h\xc3\xa9llo \xf0\x9f\x98\x80", false, false), false, false) ==
           "h\xc3\xa9llo \xf0\x9f\x98\x80");
    REFUSED(BadOption, vocab.detokenize(test::Tokens((size_t(1) << 24) + 1, 97), false, false));
}
