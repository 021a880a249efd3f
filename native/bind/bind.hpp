// What the binding files share. They translate and hold no logic.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

using Unlocked = nb::call_guard<nb::gil_scoped_release>;  // for calls that may block

nb::bytes to_bytes(const std::string &bytes);
std::string from_bytes(const nb::bytes &bytes);
nb::object to_matrix(std::vector<float> values, size_t n_rows, size_t width);
nb::object to_vector(std::vector<float> values);

void bind_errors(nb::module_ &m);
void bind_functions(nb::module_ &m);
void bind_model(nb::module_ &m);
void bind_vocab(nb::module_ &m);
void bind_sampler(nb::module_ &m);
void bind_context(nb::module_ &m);
void bind_memory(nb::module_ &m);
void bind_quantize(nb::module_ &m);
void bind_chat(nb::module_ &m);
