#include "../core/quantize.hpp"

#include "bind.hpp"

namespace {

void quantize(const std::string &src, const std::string &dst, const std::string &to, int32_t threads,
              const std::optional<std::function<bool(float)>> &progress) {
    const kvasir::QuantizeParams params{to, threads, progress.value_or(nullptr)};
    const nb::gil_scoped_release unlocked;  // the progress callback takes the GIL back by itself
    kvasir::quantize(src, dst, params);
}

}  // namespace

void bind_quantize(nb::module_ &m) {
    m.def("quantize", &quantize, "src"_a, "dst"_a, nb::kw_only(), "to"_a, "threads"_a = 0, "progress"_a = nb::none(),
          "Writes a model's weights in another layout ('q8_0', 'q4_0', 'q4_k_m', 'f16', ...) to a new file. A split "
          "model becomes one file.\n\n"
          "progress is called with 0.0 to 1.0 between tensors; returning False stops. A failure leaves an unfinished "
          "dst behind.\n"
          "Raises BadOption, ModelNotFound or ModelLoadError.");
}
