// Weights: load them, say what they are, free them when the last user is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "llama.h"
#include "vocab.hpp"

namespace kvasir {

// A shared_ptr that one thread may let go of while another copies it.
template <class T>
class Held {
  public:
    explicit Held(std::shared_ptr<T> value) : value_(std::move(value)) {}
    std::shared_ptr<T> get() const { return std::atomic_load(&value_); }
    void drop() { std::atomic_store(&value_, std::shared_ptr<T>()); }

  private:
    std::shared_ptr<T> value_;
};

// The weights themselves. Contexts, vocabularies and adapters share it, so garbage collection may come in any order.
struct ModelHandle {
    explicit ModelHandle(llama_model *model) : model(model) {}
    ~ModelHandle() { llama_model_free(model); }
    ModelHandle(const ModelHandle &) = delete;
    ModelHandle &operator=(const ModelHandle &) = delete;
    llama_model *model;
    std::mutex adapters;  // llama.cpp keeps a plain set of a model's adapters
};

struct AdapterHandle {
    AdapterHandle(std::shared_ptr<ModelHandle> model, llama_adapter_lora *adapter)
        : model(std::move(model)), adapter(adapter) {}
    ~AdapterHandle() {
        const std::lock_guard<std::mutex> lock(model->adapters);
        llama_adapter_lora_free(adapter);
    }
    AdapterHandle(const AdapterHandle &) = delete;
    AdapterHandle &operator=(const AdapterHandle &) = delete;
    std::shared_ptr<ModelHandle> model;
    llama_adapter_lora *adapter;
};

// A LoRA adapter loaded for one model. A context that uses it keeps it alive.
class Adapter {
  public:
    explicit Adapter(std::shared_ptr<AdapterHandle> handle) : handle_(std::move(handle)) {}
    std::map<std::string, std::string> metadata() const;
    bool closed() const { return handle_.get() == nullptr; }
    void close() { handle_.drop(); }
    std::shared_ptr<AdapterHandle> handle() const;  // raises Closed

  private:
    Held<AdapterHandle> handle_;
};

struct ModelParams {
    int32_t gpu_layers = -1;
    std::string split_mode = "layer";
    int32_t main_gpu = 0;
    std::vector<float> tensor_split;
    std::vector<std::string> devices;
    bool use_mmap = true;
    bool use_mlock = false;
    bool vocab_only = false;
    bool check_tensors = false;
    std::function<bool(float)> progress;  // returning false stops the load; exceptions reach the caller of load()
};

class Model {
  public:
    Model(std::shared_ptr<ModelHandle> handle, bool vocab_only) : handle_(std::move(handle)), vocab_only_(vocab_only) {}
    static std::unique_ptr<Model> load(const std::string &path, const ModelParams &params);

    void close() { handle_.drop(); }
    bool closed() const { return handle_.get() == nullptr; }
    std::shared_ptr<ModelHandle> handle() const;  // raises Closed

    Vocab vocab() const { return Vocab(handle()); }
    std::unique_ptr<Adapter> load_adapter(const std::string &path) const;
    std::optional<std::string> chat_template(const std::optional<std::string> &name) const;
    std::map<std::string, std::string> metadata() const;

    std::string description() const;
    std::string architecture() const;
    std::string file_type() const;
    std::string rope_type() const;
    std::string memory_kind() const;
    uint64_t n_params() const { return llama_model_n_params(handle()->model); }
    uint64_t n_bytes() const { return llama_model_size(handle()->model); }
    int32_t n_ctx_train() const { return llama_model_n_ctx_train(handle()->model); }
    int32_t n_embd() const { return llama_model_n_embd(handle()->model); }
    int32_t n_embd_out() const { return llama_model_n_embd_out(handle()->model); }
    int32_t n_layer() const { return llama_model_n_layer(handle()->model); }
    int32_t n_head() const { return vocab_only_ ? 0 : llama_model_n_head(handle()->model); }
    int32_t n_head_kv() const { return vocab_only_ ? 0 : llama_model_n_head_kv(handle()->model); }
    int32_t n_swa() const { return llama_model_n_swa(handle()->model); }
    uint32_t n_cls_out() const { return llama_model_n_cls_out(handle()->model); }
    bool has_encoder() const { return llama_model_has_encoder(handle()->model); }
    bool has_decoder() const { return llama_model_has_decoder(handle()->model); }
    bool is_diffusion() const { return llama_model_is_diffusion(handle()->model); }
    bool vocab_only() const { return vocab_only_; }

  private:
    Held<ModelHandle> handle_;
    bool vocab_only_;
};

// A compute device as ggml sees it.
struct Device {
    std::string name, description, kind;
    uint64_t memory_free, memory_total;
};
std::vector<Device> list_devices();

}  // namespace kvasir
