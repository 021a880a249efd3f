#include "../core/error.hpp"

#include <exception>

#include "bind.hpp"

namespace {

const char *class_name(kvasir::Kind kind) {
    switch (kind) {
        case kvasir::Kind::BadOption:
            return "BadOption";
        case kvasir::Kind::BadGrammar:
            return "BadGrammar";
        case kvasir::Kind::BadSchema:
            return "BadSchema";
        case kvasir::Kind::TokenizeFailed:
            return "TokenizeFailed";
        case kvasir::Kind::ModelLoadError:
            return "ModelLoadError";
        case kvasir::Kind::ModelNotFound:
            return "ModelNotFound";
        case kvasir::Kind::Unsupported:
            return "Unsupported";
        case kvasir::Kind::Closed:
            return "Closed";
        case kvasir::Kind::EngineStopped:
            return "EngineStopped";
    }
    return "KvasirError";
}

}  // namespace

void bind_errors(nb::module_ &) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const kvasir::Error &e) {
            const nb::object type = nb::module_::import_("kvasir.errors").attr(class_name(e.kind));
            PyErr_SetString(type.ptr(), e.what());
        }
    });
}

nb::bytes to_bytes(const std::string &bytes) { return nb::bytes(bytes.data(), bytes.size()); }
std::string from_bytes(const nb::bytes &bytes) { return std::string(bytes.c_str(), bytes.size()); }

namespace {

template <class... Shape>
nb::object to_numpy(std::vector<float> values, Shape... shape) {
    auto *owned = new std::vector<float>(std::move(values));
    const nb::capsule owner(owned, [](void *p) noexcept { delete static_cast<std::vector<float> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, float>(owned->data(), {static_cast<size_t>(shape)...}, owner));
}

}  // namespace

nb::object to_matrix(std::vector<float> values, size_t n_rows, size_t width) {
    return to_numpy(std::move(values), n_rows, width);
}

nb::object to_vector(std::vector<float> values) {
    const size_t n = values.size();
    return to_numpy(std::move(values), n);
}
