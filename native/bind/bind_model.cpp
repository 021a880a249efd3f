#include "../core/model.hpp"

#include "bind.hpp"

using kvasir::Adapter;
using kvasir::Model;

namespace {

std::unique_ptr<Model> load(const std::string &path, int32_t gpu_layers, const std::string &split_mode,
                            int32_t main_gpu, const std::vector<float> &tensor_split,
                            const std::vector<std::string> &devices, bool use_mmap, bool use_mlock, bool vocab_only,
                            bool check_tensors, const std::optional<std::function<bool(float)>> &progress) {
    kvasir::ModelParams params;
    params.gpu_layers = gpu_layers;
    params.split_mode = split_mode;
    params.main_gpu = main_gpu;
    params.tensor_split = tensor_split;
    params.devices = devices;
    params.use_mmap = use_mmap;
    params.use_mlock = use_mlock;
    params.vocab_only = vocab_only;
    params.check_tensors = check_tensors;
    params.progress = progress.value_or(nullptr);
    const nb::gil_scoped_release unlocked;  // the progress callback takes the GIL back by itself
    return Model::load(path, params);
}

}  // namespace

void bind_model(nb::module_ &m) {
    nb::class_<Adapter>(m, "Adapter", "A LoRA adapter loaded for one model, which it keeps alive.")
        .def_prop_ro("metadata", &Adapter::metadata)
        .def_prop_ro("closed", &Adapter::closed)
        .def("close", &Adapter::close, Unlocked());

    nb::class_<Model>(m, "Model",
                      "Weights from a GGUF file. Contexts and vocabularies made from it keep them alive after close().")
        .def_static("load", &load, "path"_a, nb::kw_only(), "gpu_layers"_a = -1, "split_mode"_a = "layer",
                    "main_gpu"_a = 0, "tensor_split"_a = std::vector<float>(), "devices"_a = std::vector<std::string>(),
                    "use_mmap"_a = true, "use_mlock"_a = false, "vocab_only"_a = false, "check_tensors"_a = false,
                    "progress"_a = nb::none(),
                    "Loads a GGUF file. progress is called with 0.0 to 1.0; returning False stops. Raises "
                    "ModelNotFound or ModelLoadError.")
        .def("close", &Model::close, Unlocked(), "Lets go of the weights; harmless when closed already.")
        .def_prop_ro("closed", &Model::closed)
        .def_prop_ro("vocab", &Model::vocab)
        .def("load_adapter", &Model::load_adapter, "path"_a, Unlocked(), "Loads a LoRA adapter for this model.")
        .def("chat_template", &Model::chat_template, "name"_a = nb::none(),
             "The model's chat template, or its named variant such as 'tool_use'; None where it has none.")
        .def_prop_ro("metadata", &Model::metadata, "The file's scalar keys as text.")
        .def_prop_ro("description", &Model::description)
        .def_prop_ro("architecture", &Model::architecture)
        .def_prop_ro("file_type", &Model::file_type)
        .def_prop_ro("rope_type", &Model::rope_type)
        .def_prop_ro("memory_kind", &Model::memory_kind,
                     "'plain', 'window', 'recurrent', 'hybrid', or 'none' for encoders.")
        .def_prop_ro("n_params", &Model::n_params)
        .def_prop_ro("n_bytes", &Model::n_bytes)
        .def_prop_ro("n_ctx_train", &Model::n_ctx_train)
        .def_prop_ro("n_embd", &Model::n_embd)
        .def_prop_ro("n_embd_out", &Model::n_embd_out)
        .def_prop_ro("n_layer", &Model::n_layer)
        .def_prop_ro("n_head", &Model::n_head)
        .def_prop_ro("n_head_kv", &Model::n_head_kv)
        .def_prop_ro("n_swa", &Model::n_swa)
        .def_prop_ro("n_cls_out", &Model::n_cls_out)
        .def_prop_ro("has_encoder", &Model::has_encoder)
        .def_prop_ro("has_decoder", &Model::has_decoder)
        .def_prop_ro("is_diffusion", &Model::is_diffusion)
        .def_prop_ro("vocab_only", &Model::vocab_only);
}
