#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <exception>

#include "error.hpp"
#include "gguf_check.hpp"
#include "runtime.hpp"

namespace kvasir {
namespace {

struct Progress {
    const std::function<bool(float)> &report;
    std::exception_ptr thrown;
    bool stopped = false;

    // Called by llama.cpp between tensors; an exception must not cross its frames.
    static bool on_progress(float fraction, void *self) {
        auto *progress = static_cast<Progress *>(self);
        try {
            without_abort_trap([&] { progress->stopped = !progress->report(fraction); });
        } catch (...) {
            progress->thrown = std::current_exception();
            progress->stopped = true;
        }
        return !progress->stopped;
    }
};

llama_split_mode split_mode_of(const std::string &name) {
    if (name == "none") return LLAMA_SPLIT_MODE_NONE;
    if (name == "layer") return LLAMA_SPLIT_MODE_LAYER;
    if (name == "row") return LLAMA_SPLIT_MODE_ROW;
    throw Error(Kind::BadOption, "split_mode is 'none', 'layer' or 'row', not '" + name + "'.");
}

std::vector<ggml_backend_dev_t> devices_of(const std::vector<std::string> &names) {
    std::vector<ggml_backend_dev_t> out;
    for (const std::string &name : names) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (!device) {
            std::string known;
            for (const Device &d : list_devices()) {
                known += known.empty() ? d.name : ", " + d.name;
            }
            throw Error(Kind::BadOption, "there is no device '" + name + "'; this build sees: " + known + ".");
        }
        out.push_back(device);
    }
    if (!out.empty()) {
        out.push_back(nullptr);
    }
    return out;
}

template <class Key, class Value>
std::map<std::string, std::string> read_metadata(int32_t n, Key key_at, Value value_at) {
    std::map<std::string, std::string> out;
    const auto read = [](auto get, int32_t i) {
        std::string text(256, '\0');
        int32_t len = get(i, text.data(), text.size());
        if (len >= static_cast<int32_t>(text.size())) {
            text.resize(static_cast<size_t>(len) + 1);
            len = get(i, text.data(), text.size());
        }
        text.resize(len > 0 ? static_cast<size_t>(len) : 0);
        return text;
    };
    for (int32_t i = 0; i < n; ++i) {
        out[read(key_at, i)] = read(value_at, i);
    }
    return out;
}

}  // namespace

std::unique_ptr<Model> Model::load(const std::string &path, const ModelParams &params) {
    ensure_backend();
    check_gguf(path);

    llama_model_params raw = llama_model_default_params();
    raw.n_gpu_layers = params.gpu_layers;
    raw.split_mode = split_mode_of(params.split_mode);
    raw.main_gpu = params.main_gpu;
    if (params.use_mlock) {
        raw.load_mode = params.use_mmap ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MLOCK;
    } else if (!params.use_mmap) {
        raw.load_mode = LLAMA_LOAD_MODE_NONE;
    }
    raw.vocab_only = params.vocab_only;
    raw.check_tensors = params.check_tensors;

    std::vector<ggml_backend_dev_t> devices = devices_of(params.devices);
    raw.devices = devices.empty() ? nullptr : devices.data();
    std::vector<float> split = params.tensor_split;
    if (split.size() > llama_max_devices()) {
        throw Error(Kind::BadOption, "tensor_split names " + std::to_string(split.size()) + " devices; at most " +
                                         std::to_string(llama_max_devices()) + " are possible.");
    }
    if (!std::all_of(split.begin(), split.end(), [](float part) { return std::isfinite(part) && part >= 0.0f; })) {
        throw Error(Kind::BadOption, "tensor_split holds a share of each device: numbers of 0 or more.");
    }
    split.resize(llama_max_devices(), 0.0f);
    raw.tensor_split = params.tensor_split.empty() ? nullptr : split.data();

    Progress progress{params.progress, nullptr};
    if (params.progress) {
        raw.progress_callback = Progress::on_progress;
        raw.progress_callback_user_data = &progress;
    }

    LogCapture log;
    llama_model *model = nullptr;
    with_abort_trap(Kind::ModelLoadError, "loading " + path,
                    [&] { model = llama_model_load_from_file(path.c_str(), raw); });
    if (progress.thrown) {
        if (model) llama_model_free(model);
        std::rethrow_exception(progress.thrown);
    }
    if (progress.stopped) {
        if (model) llama_model_free(model);
        throw Error(Kind::ModelLoadError, "loading " + path + " was stopped by its progress callback.");
    }
    if (!model) {
        throw Error(Kind::ModelLoadError,
                    path + " could not be loaded: " + log.reason("llama.cpp gave no reason") + ".");
    }
    return std::unique_ptr<Model>(new Model(std::make_shared<ModelHandle>(model), params.vocab_only));
}

std::shared_ptr<ModelHandle> Model::handle() const {
    auto handle = handle_.get();
    if (!handle) {
        throw Error(Kind::Closed, "this model is closed; load it again to use it.");
    }
    return handle;
}

std::unique_ptr<Adapter> Model::load_adapter(const std::string &path) const {
    LogCapture log;
    auto model = handle();
    if (vocab_only_) {
        throw Error(Kind::Unsupported, "adapters need weights; this model was loaded with vocab_only.");
    }
    llama_adapter_lora *adapter = nullptr;
    with_abort_trap(Kind::ModelLoadError, "loading adapter " + path, [&] {
        const std::lock_guard<std::mutex> lock(model->adapters);
        adapter = llama_adapter_lora_init(model->model, path.c_str());
    });
    if (!adapter) {
        throw Error(Kind::ModelLoadError,
                    "adapter " + path + " could not be loaded: " + log.reason("llama.cpp gave no reason") + ".");
    }
    return std::make_unique<Adapter>(std::make_shared<AdapterHandle>(model, adapter));
}

std::shared_ptr<AdapterHandle> Adapter::handle() const {
    auto handle = handle_.get();
    if (!handle) {
        throw Error(Kind::Closed, "this adapter is closed; load it again to use it.");
    }
    return handle;
}

std::map<std::string, std::string> Adapter::metadata() const {
    const auto open = handle();
    const llama_adapter_lora *adapter = open->adapter;
    return read_metadata(
        llama_adapter_meta_count(adapter),
        [&](int32_t i, char *buf, size_t n) { return llama_adapter_meta_key_by_index(adapter, i, buf, n); },
        [&](int32_t i, char *buf, size_t n) { return llama_adapter_meta_val_str_by_index(adapter, i, buf, n); });
}

std::map<std::string, std::string> Model::metadata() const {
    const auto open = handle();
    const llama_model *model = open->model;
    return read_metadata(
        llama_model_meta_count(model),
        [&](int32_t i, char *buf, size_t n) { return llama_model_meta_key_by_index(model, i, buf, n); },
        [&](int32_t i, char *buf, size_t n) { return llama_model_meta_val_str_by_index(model, i, buf, n); });
}

std::optional<std::string> Model::chat_template(const std::optional<std::string> &name) const {
    const auto open = handle();
    const char *text = llama_model_chat_template(open->model, name ? name->c_str() : nullptr);
    return text ? std::optional<std::string>(text) : std::nullopt;
}

std::string Model::description() const {
    char text[256] = {};
    llama_model_desc(handle()->model, text, sizeof(text));
    return text;
}

std::string Model::architecture() const {
    const auto meta = metadata();
    const auto found = meta.find("general.architecture");
    return found == meta.end() ? "" : found->second;
}

std::string Model::file_type() const { return llama_ftype_name(llama_model_ftype(handle()->model)); }

std::string Model::rope_type() const {
    switch (llama_model_rope_type(handle()->model)) {
        case LLAMA_ROPE_TYPE_NORM:
            return "norm";
        case LLAMA_ROPE_TYPE_NEOX:
            return "neox";
        case LLAMA_ROPE_TYPE_MROPE:
            return "mrope";
        case LLAMA_ROPE_TYPE_IMROPE:
            return "imrope";
        case LLAMA_ROPE_TYPE_VISION:
            return "vision";
        default:
            return "none";
    }
}

std::string Model::memory_kind() const {
    const auto open = handle();
    const llama_model *model = open->model;
    if (llama_model_is_recurrent(model)) return "recurrent";
    if (llama_model_is_hybrid(model)) return "hybrid";
    const auto meta = metadata();
    const auto causal = meta.find(architecture() + ".attention.causal");
    if (!llama_model_has_decoder(model) || (causal != meta.end() && causal->second == "false")) return "none";
    return llama_model_n_swa(model) > 0 ? "window" : "plain";
}

std::vector<Device> list_devices() {
    ensure_backend();
    std::vector<Device> out;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        const char *kind = "accel";
        switch (ggml_backend_dev_type(device)) {
            case GGML_BACKEND_DEVICE_TYPE_CPU:
                kind = "cpu";
                break;
            case GGML_BACKEND_DEVICE_TYPE_GPU:
                kind = "gpu";
                break;
            case GGML_BACKEND_DEVICE_TYPE_IGPU:
                kind = "igpu";
                break;
            default:
                break;
        }
        out.push_back({ggml_backend_dev_name(device), ggml_backend_dev_description(device), kind, free, total});
    }
    return out;
}

}  // namespace kvasir
