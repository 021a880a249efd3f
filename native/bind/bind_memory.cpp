#include "../core/memory.hpp"

#include "bind.hpp"

using kvasir::Memory;

namespace {

nb::bytes export_span(Memory &memory, int32_t seq, int32_t p0, int32_t p1, const std::string &part) {
    size_t size = 0;
    {
        const nb::gil_scoped_release unlocked;
        size = memory.span_bytes(p0, p1, part);
    }
    const auto span = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!span.is_valid()) nb::raise_python_error();
    char *out = PyBytes_AsString(span.ptr());  // nobody else has it yet
    {
        const nb::gil_scoped_release unlocked;
        memory.export_span(seq, p0, p1, part, out);
    }
    return span;
}

bool import_span(Memory &memory, int32_t seq, int32_t p0, const std::vector<nb::bytes> &payloads,
                 const std::string &part) {
    std::vector<std::string_view> spans;  // of the caller's own bytes, which `payloads` keeps alive
    for (const nb::bytes &payload : payloads) {
        spans.emplace_back(payload.c_str(), payload.size());
    }
    const nb::gil_scoped_release unlocked;
    return memory.import_span(seq, p0, spans, part);
}

nb::bytes state(Memory &memory, int32_t seq, bool partial) {
    std::string data;
    {
        const nb::gil_scoped_release unlocked;
        data = memory.state(seq, partial);
    }
    return to_bytes(data);
}

bool set_state(Memory &memory, int32_t seq, const nb::bytes &data, bool partial) {
    const std::string bytes = from_bytes(data);
    const nb::gil_scoped_release unlocked;
    return memory.set_state(seq, bytes, partial);
}

}  // namespace

void bind_memory(nb::module_ &m) {
    nb::class_<Memory>(m, "Memory", "A context's KV memory. Spans are half open, [p0, p1); p1=None means the end.")
        .def_prop_ro("kind", &Memory::kind, "'plain', 'window', 'recurrent', 'hybrid' or 'none'.")
        .def_prop_ro("window", &Memory::window, "Tokens a sliding window spans, 0 without one.")
        .def_prop_ro("can_shift", &Memory::can_shift, Unlocked(), "Whether positions can be moved exactly.")
        .def_prop_ro("n_cells", &Memory::n_cells, Unlocked())
        .def_prop_ro("used_cells", &Memory::used_cells, Unlocked())
        .def("pos_min", &Memory::pos_min, "seq"_a, Unlocked(), "The first position held, or None.")
        .def("pos_max", &Memory::pos_max, "seq"_a, Unlocked(), "The last position held, or None.")
        .def("remove", &Memory::remove, "seq"_a, "p0"_a, "p1"_a.none(), Unlocked(),
             "Drops a span. False: this memory cannot, and nothing changed.")
        .def("share", &Memory::share, "src"_a, "dst"_a, "n_tokens"_a, Unlocked(),
             "Makes dst the first n_tokens of src. False: not possible exactly, and dst is empty.")
        .def("copy", &Memory::copy, "src"_a, "dst"_a, Unlocked(), "Makes dst a copy of all of src.")
        .def("keep", &Memory::keep, "seq"_a, Unlocked(), "Drops every other sequence.")
        .def("shift", &Memory::shift, "seq"_a, "p0"_a, "p1"_a.none(), "delta"_a, Unlocked(),
             "Moves a span's positions by delta, at once; shared cells are separated first. Raises Unsupported where "
             "it would be wrong.")
        .def("clear", &Memory::clear, Unlocked())
        .def("flush", &Memory::flush, Unlocked(), "Applies what llama.cpp left pending.")
        .def("export_span", &export_span, "seq"_a, "p0"_a, "p1"_a, "part"_a = "base",
             "The KV of a span as bytes, the same in both layouts.")
        .def("import_span", &import_span, "seq"_a, "p0"_a, "payloads"_a, "part"_a = "base",
             "Appends exported spans at p0, which must be the sequence's end. False: no room, and nothing changed.")
        .def("state", &state, "seq"_a, nb::kw_only(), "partial"_a = false,
             "llama.cpp's own state of a sequence; partial: only what cannot be rewound.")
        .def("set_state", &set_state, "seq"_a, "data"_a, nb::kw_only(), "partial"_a = false,
             "Restores state(). False: it failed, and the sequence is empty.");
}
