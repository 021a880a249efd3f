// Files: truncated anywhere, changed anywhere, or not files at all. Each is refused or loads; nothing else happens.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/gguf_check.hpp"
#include "rig.hpp"

namespace fs = std::filesystem;

namespace {

std::string bytes_of(const std::string &path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
}

struct Scratch {
    const fs::path folder = fs::temp_directory_path() / ("kvasir-native-tests-" + std::to_string(::getpid()));
    Scratch() { fs::create_directories(folder); }
    ~Scratch() { fs::remove_all(folder); }

    std::string file(const std::string &bytes) const {
        std::ofstream(folder / "x.gguf", std::ios::binary | std::ios::trunc) << bytes;
        return (folder / "x.gguf").string();
    }
};

// Loads and, where that works, runs a little. Returns whether it was refused.
bool refused(const std::string &path) {
    try {
        auto model = kvasir::Model::load(path, {});
        model->metadata();
        model->vocab().eog_tokens();
        return false;
    } catch (const kvasir::Error &) {
        return true;
    }
}

}  // namespace

TEST(the_facts_of_a_file) {
    const auto facts = kvasir::check_gguf(test::model("llama"));
    EXPECT(facts.architecture == "llama" && facts.block_count > 0 && facts.context_length == 2048 &&
           facts.embedding_length == 64);
    EXPECT(facts.n_vocab > 256 && facts.n_tensors > 0 && facts.n_kv > 0 && facts.size_bytes > 1000);
}

TEST(what_is_not_a_model_file_is_refused) {
    const Scratch scratch;
    REFUSED(ModelNotFound, kvasir::check_gguf("nowhere/at/all.gguf"));
    REFUSED(ModelNotFound, kvasir::check_gguf(test::model("llama") + "/inside.gguf"));
    REFUSED(ModelNotFound, kvasir::check_gguf(std::string("a\0b", 3)));
    REFUSED(ModelNotFound, kvasir::check_gguf(""));
    REFUSED(ModelLoadError, kvasir::check_gguf(scratch.folder.string()));
    REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file("")));
    REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file("GGUF")));
    REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file("hello, I am a text")));
    REFUSED(ModelLoadError, kvasir::check_gguf(test::model("lora")));
    const std::string pipe = (scratch.folder / "pipe").string();
    EXPECT(::mkfifo(pipe.c_str(), 0600) == 0);
    REFUSED(ModelLoadError, kvasir::check_gguf(pipe));
    for (const uint32_t version : {0u, 1u, 4u, 0x03000000u, 0xffffffffu}) {
        std::string bytes = bytes_of(test::model("llama"));
        bytes.replace(4, 4, reinterpret_cast<const char *>(&version), 4);
        REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file(bytes)));
    }
}

TEST(truncated_files_are_refused_at_every_length) {
    const Scratch scratch;
    const std::string whole = bytes_of(test::model("llama"));
    for (size_t n = 0; n < whole.size(); n += 1 + n / 50) {
        REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file(whole.substr(0, n))));
    }
    REFUSED(ModelLoadError, kvasir::check_gguf(scratch.file(whole.substr(0, whole.size() - 64))));
}

TEST(changed_bytes_are_refused_or_harmless) {
    const Scratch scratch;
    std::mt19937 random(5);
    for (const char *name : {"llama", "gemma3", "mamba", "lfm2", "bert"}) {
        const std::string whole = bytes_of(test::model(name));
        const size_t header = std::min<size_t>(whole.size(), 1500);
        int n_refused = 0;
        for (int i = 0; i < 100; ++i) {
            std::string bytes = whole;
            for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
                bytes[8 + random() % (header - 8)] = static_cast<char>(random() % 4 == 0 ? 255 : random());
            }
            n_refused += refused(scratch.file(bytes)) ? 1 : 0;
        }
        EXPECT(n_refused > 20);
    }
}
