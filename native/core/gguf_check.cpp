#include "gguf_check.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "error.hpp"
#include "gguf.h"
#include "llama.h"
#include "runtime.hpp"

namespace kvasir {
namespace {

using GgufPtr = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

// llama.cpp's own limits (LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS), and bounds far above any real model.
constexpr int64_t MAX_LAYERS = 512;
constexpr int64_t MAX_EXPERTS = 1024;
constexpr int64_t MAX_WIDTH = 1 << 20;
constexpr int64_t MAX_CONTEXT = int64_t(1) << 31;

[[noreturn]] void refuse(const std::string &path, const std::string &why) {
    throw Error(Kind::ModelLoadError, path + " cannot be loaded: " + why);
}

int64_t file_size(const std::string &path) {
    if (path.find('\0') != std::string::npos) {
        throw Error(Kind::ModelNotFound, "a path holds no NUL byte; check what was given.");
    }
    struct stat st{};
    if (::stat(path.c_str(), &st) != 0) {
        if (errno == ENOENT || errno == ENOTDIR) {
            throw Error(Kind::ModelNotFound,
                        "there is no file " + path + "; check the path, or name a model reference such as 'smollm2'.");
        }
        refuse(path, std::strerror(errno) + std::string("."));
    }
    if (S_ISDIR(st.st_mode)) {
        refuse(path, "it is a folder; name the .gguf file inside it.");
    }
    if (!S_ISREG(st.st_mode)) {
        refuse(path, "it is not a regular file.");
    }
    return st.st_size;
}

void check_header(const std::string &path, int64_t size) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        refuse(path, std::string(std::strerror(errno)) + "; check its permissions.");
    }
    if (size == 0) {
        refuse(path, "the file is empty; download it again.");
    }
    char magic[4] = {};
    uint32_t version = 0;
    in.read(magic, 4);
    in.read(reinterpret_cast<char *>(&version), 4);
    if (!in || std::memcmp(magic, "GGUF", 4) != 0) {
        refuse(path, "it is not a GGUF file (it does not begin with 'GGUF').");
    }
    if (version != 2 && version != 3) {
        refuse(path, "it is GGUF version " + std::to_string(version) + "; versions 2 and 3 are understood.");
    }
}

std::optional<int64_t> integer(const gguf_context *gguf, int64_t key) {
    switch (gguf_get_kv_type(gguf, key)) {
        case GGUF_TYPE_UINT8:
            return gguf_get_val_u8(gguf, key);
        case GGUF_TYPE_INT8:
            return gguf_get_val_i8(gguf, key);
        case GGUF_TYPE_UINT16:
            return gguf_get_val_u16(gguf, key);
        case GGUF_TYPE_INT16:
            return gguf_get_val_i16(gguf, key);
        case GGUF_TYPE_UINT32:
            return gguf_get_val_u32(gguf, key);
        case GGUF_TYPE_INT32:
            return gguf_get_val_i32(gguf, key);
        case GGUF_TYPE_UINT64:
            return static_cast<int64_t>(gguf_get_val_u64(gguf, key));
        case GGUF_TYPE_INT64:
            return gguf_get_val_i64(gguf, key);
        default:
            return std::nullopt;
    }
}

// Reads keys of one file and refuses impossible ones by name.
class Keys {
  public:
    Keys(const std::string &path, const gguf_context *gguf) : path_(path), gguf_(gguf) {}

    std::string text(const std::string &name) const {
        const int64_t key = gguf_find_key(gguf_, name.c_str());
        if (key < 0) return "";
        if (gguf_get_kv_type(gguf_, key) != GGUF_TYPE_STRING) {
            refuse(path_, "its key " + name + " is not text.");
        }
        return gguf_get_val_str(gguf_, key);
    }

    // A number, or for a per-layer key every element of the array, within [least, most].
    std::optional<int64_t> number(const std::string &name, int64_t least, int64_t most) const {
        const int64_t key = gguf_find_key(gguf_, name.c_str());
        if (key < 0) return std::nullopt;
        if (gguf_get_kv_type(gguf_, key) == GGUF_TYPE_ARRAY) {
            array_within(name, key, most);
            return std::nullopt;
        }
        const std::optional<int64_t> value = integer(gguf_, key);
        if (!value) {
            refuse(path_, "its key " + name + " is not a whole number.");
        }
        if (*value < least || *value > most) {
            refuse(path_, "its key " + name + " is " + std::to_string(*value) + "; possible values are " +
                              std::to_string(least) + " to " + std::to_string(most) + ".");
        }
        return value;
    }

    int64_t required(const std::string &name, int64_t least, int64_t most) const {
        const auto value = number(name, least, most);
        if (!value) {
            refuse(path_, "it has no usable key " + name + ".");
        }
        return *value;
    }

    void finite(const std::string &name) const {
        const int64_t key = gguf_find_key(gguf_, name.c_str());
        if (key >= 0 && gguf_get_kv_type(gguf_, key) == GGUF_TYPE_FLOAT32 &&
            !std::isfinite(gguf_get_val_f32(gguf_, key))) {
            refuse(path_, "its key " + name + " is not a finite number.");
        }
    }

    int64_t array_size(const std::string &name, gguf_type type) const {
        const int64_t key = gguf_find_key(gguf_, name.c_str());
        if (key < 0) return -1;
        if (gguf_get_kv_type(gguf_, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf_, key) != type) {
            refuse(path_, "its key " + name + " is not a list of " + gguf_type_name(type) + ".");
        }
        return static_cast<int64_t>(gguf_get_arr_n(gguf_, key));
    }

  private:
    void array_within(const std::string &name, int64_t key, int64_t most) const {
        const gguf_type type = gguf_get_arr_type(gguf_, key);
        if (type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) return;
        const size_t n = gguf_get_arr_n(gguf_, key);
        const auto *values = static_cast<const uint32_t *>(gguf_get_arr_data(gguf_, key));
        for (size_t i = 0; i < n; ++i) {
            if (static_cast<int64_t>(values[i]) > most) {
                refuse(path_, "its key " + name + " holds " + std::to_string(values[i]) + " for layer " +
                                  std::to_string(i) + "; at most " + std::to_string(most) + " is possible.");
            }
        }
    }

    const std::string &path_;
    const gguf_context *gguf_;
};

void check_vocabulary(const std::string &path, const Keys &keys, GgufFacts &facts) {
    const std::string model = keys.text("tokenizer.ggml.model");
    const int64_t n = keys.array_size("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    if (model.empty() || model == "none" || model == "no_vocab" || n < 0) return;
    if (n == 0) {
        refuse(path, "its vocabulary is empty.");
    }
    facts.n_vocab = n;
    for (const auto &[name, type] : {std::pair{"tokenizer.ggml.scores", GGUF_TYPE_FLOAT32},
                                     std::pair{"tokenizer.ggml.token_type", GGUF_TYPE_INT32}}) {
        const int64_t size = keys.array_size(name, type);
        if (size >= 0 && size < n) {
            refuse(path, std::string("its list ") + name + " has " + std::to_string(size) + " entries for " +
                             std::to_string(n) + " tokens.");
        }
    }
    for (const char *special :
         {"bos", "eos", "eot", "eom", "unknown", "separator", "padding", "mask", "fim_pre", "fim_suf", "fim_mid",
          "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle", "cls"}) {
        const std::string name = std::string("tokenizer.ggml.") + special + "_token_id";
        const auto id = keys.number(name, 0, UINT32_MAX);  // 0xFFFFFFFF stands for "none" in some files
        if (id && *id >= n && *id != UINT32_MAX) {
            refuse(path, "its key " + name + " is " + std::to_string(*id) + ", outside its vocabulary of " +
                             std::to_string(n) + " tokens.");
        }
    }
}

void check_shape(const std::string &path, const Keys &keys, GgufFacts &facts) {
    const std::string arch = facts.architecture + ".";
    facts.context_length = keys.required(arch + "context_length", 1, MAX_CONTEXT);
    facts.embedding_length = keys.required(arch + "embedding_length", 1, MAX_WIDTH);
    facts.block_count = keys.required(arch + "block_count", 1, MAX_LAYERS);
    const auto heads = keys.number(arch + "attention.head_count", 0, MAX_WIDTH);
    const auto kv_heads = keys.number(arch + "attention.head_count_kv", 0, MAX_WIDTH);
    if (heads && kv_heads && *kv_heads > 0 && *heads % *kv_heads != 0) {
        refuse(path, "its " + std::to_string(*heads) + " attention heads cannot share " + std::to_string(*kv_heads) +
                         " key/value heads evenly.");
    }
    if (heads && *heads > facts.embedding_length) {
        refuse(path, "it claims " + std::to_string(*heads) + " attention heads in a width of " +
                         std::to_string(facts.embedding_length) + ".");
    }
    for (const char *name :
         {"feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length"}) {
        keys.number(arch + name, 0, 16 * MAX_WIDTH);
    }
    for (const char *name :
         {"attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
          "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
          "shortconv.l_cache", "wkv.head_size", "vocab_size"}) {
        keys.number(arch + name, 1, 16 * MAX_WIDTH);
    }
    for (const char *name : {"rope.dimension_count", "rope.dimension_count_swa"}) {
        const auto rotated = keys.number(arch + name, 1, 16 * MAX_WIDTH);
        if (rotated && *rotated % 2 != 0) {
            refuse(path, "it rotates " + std::to_string(*rotated) + " dimensions of a head; rotation takes pairs.");
        }
    }
    keys.number(arch + "embedding_length_out", 0, MAX_WIDTH);
    keys.number(arch + "attention.sliding_window", 0, MAX_CONTEXT);
    keys.number(arch + "nextn_predict_layers", 0, facts.block_count);
    const auto experts = keys.number(arch + "expert_count", 0, MAX_EXPERTS);
    const auto used = keys.number(arch + "expert_used_count", 0, MAX_EXPERTS);
    if (used && *used > experts.value_or(0)) {
        refuse(path, "it uses " + std::to_string(*used) + " experts of " + std::to_string(experts.value_or(0)) + ".");
    }
    if (experts && *experts > 0 && used && *used == 0) {
        refuse(path, "it has " + std::to_string(*experts) + " experts and uses none.");
    }
    for (const char *name : {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "rope.freq_base",
                             "rope.scaling.factor"}) {
        keys.finite(arch + name);
    }
    const std::string scaling = keys.text(arch + "rope.scaling.type");
    static const std::set<std::string> known = {"", "none", "linear", "yarn", "longrope"};
    if (known.count(scaling) == 0) {
        refuse(path, "its rope scaling '" + scaling + "' is unknown; none, linear, yarn and longrope are understood.");
    }
}

// Matrices of integers, and norms that are not F32, are met by an assertion in the middle of a decode.
void check_type(const std::string &path, const std::string &name, ggml_type type) {
    const bool number =
        ggml_is_quantized(type) || type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    const bool table = name.find("tid2eid") != std::string::npos;  // experts by token id: whole numbers
    const bool added = name.find("norm.weight") != std::string::npos ||
                       (name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0);
    if ((!number && !table) || (added && type != GGML_TYPE_F32)) {
        refuse(path, "its tensor " + name + " is of type " + ggml_type_name(type) + ", which cannot be computed with.");
    }
}

void check_tensors(const std::string &path, const gguf_context *gguf, int64_t size) {
    const int64_t n = gguf_get_n_tensors(gguf);
    const size_t data = gguf_get_data_offset(gguf);
    for (int64_t i = 0; i < n; ++i) {
        check_type(path, gguf_get_tensor_name(gguf, i), gguf_get_tensor_type(gguf, i));
        const size_t end = data + gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i);
        if (end > static_cast<size_t>(size)) {
            refuse(path, std::string("it is truncated: tensor ") + gguf_get_tensor_name(gguf, i) + " ends at byte " +
                             std::to_string(end) + ", the file has " + std::to_string(size) + "; download it again.");
        }
    }
}

}  // namespace

GgufFacts check_gguf(const std::string &path) {
    ensure_backend();
    GgufFacts facts;
    facts.size_bytes = file_size(path);
    check_header(path, facts.size_bytes);

    LogCapture log;
    with_abort_trap(Kind::ModelLoadError, "reading " + path, [&] {
        GgufPtr gguf(nullptr, &gguf_free);
        try {
            gguf.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
        } catch (const std::exception &e) {
            refuse(path, std::string("its header is broken: ") + e.what() + ".");
        }
        if (!gguf) {
            refuse(path, "its header is broken or cut short: " + log.reason("no reason given") + ".");
        }
        const Keys keys(path, gguf.get());
        facts.n_kv = gguf_get_n_kv(gguf.get());
        facts.n_tensors = gguf_get_n_tensors(gguf.get());
        facts.architecture = keys.text("general.architecture");
        facts.name = keys.text("general.name");
        if (facts.architecture.empty()) {
            refuse(path, "it names no architecture (key general.architecture).");
        }
        const std::string type = keys.text("general.type");
        if (type == "adapter") {
            refuse(path, "it is a LoRA adapter, not a model; pass it as adapters=[...] beside its model.");
        }
        if (facts.architecture == "clip" || type == "mmproj") {
            refuse(path, "it is a vision projector, not a language model.");
        }
        if (const auto ftype = keys.number("general.file_type", 0, INT32_MAX)) {
            facts.file_type = llama_ftype_name(static_cast<llama_ftype>(*ftype));
        }
        check_shape(path, keys, facts);
        check_vocabulary(path, keys, facts);
        check_tensors(path, gguf.get(), facts.size_bytes);
    });
    return facts;
}

}  // namespace kvasir
