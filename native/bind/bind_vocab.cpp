#include "../core/error.hpp"
#include "../core/model.hpp"
#include "../core/vocab.hpp"
#include "bind.hpp"

using kvasir::Vocab;

namespace {

std::string utf8(const std::variant<nb::str, nb::bytes> &text) {
    if (std::holds_alternative<nb::bytes>(text)) {
        return from_bytes(std::get<nb::bytes>(text));
    }
    Py_ssize_t size = 0;
    const char *data = PyUnicode_AsUTF8AndSize(std::get<nb::str>(text).ptr(), &size);
    if (!data) {
        PyErr_Clear();
        throw kvasir::Error(kvasir::Kind::TokenizeFailed, "the text holds a lone surrogate, which is no character.");
    }
    return std::string(data, static_cast<size_t>(size));
}

template <class Class>
void special(Class &c, const char *name) {
    c.def_prop_ro(name, [name](const Vocab &v) { return v.special(name); });
}

}  // namespace

void bind_vocab(nb::module_ &m) {
    nb::class_<Vocab> c(m, "Vocab", "Text to tokens and back. Safe from any thread; keeps its model's weights alive.");
    c.def_prop_ro("n_tokens", &Vocab::n_tokens)
        .def_prop_ro("kind", &Vocab::kind, "'none', 'spm', 'bpe', 'wpm', 'ugm', 'rwkv', 'plamo2' or 'test'.")
        .def_prop_ro("add_bos", &Vocab::add_bos)
        .def_prop_ro("add_eos", &Vocab::add_eos)
        .def_prop_ro("add_sep", &Vocab::add_sep)
        .def_prop_ro("eog_tokens", &Vocab::eog_tokens, "Every token that ends a generation.")
        .def(
            "tokenize",
            [](const Vocab &v, const std::variant<nb::str, nb::bytes> &text, bool add_special, bool parse_special) {
                const std::string bytes = utf8(text);
                const nb::gil_scoped_release unlocked;
                return v.tokenize(bytes, add_special, parse_special);
            },
            "text"_a, nb::kw_only(), "add_special"_a = true, "parse_special"_a = false,
            "Token ids of a text. add_special adds what the model wants at its ends; parse_special reads "
            "'<|im_start|>' and the like as one token.")
        .def(
            "token_to_bytes",
            [](const Vocab &v, int32_t token, bool special) { return to_bytes(v.token_to_bytes(token, special)); },
            "token"_a, nb::kw_only(), "special"_a = false,
            "The bytes of one token; control tokens are empty unless special=True.")
        .def(
            "detokenize",
            [](const Vocab &v, const std::vector<int32_t> &tokens, bool remove_special, bool unparse_special) {
                return to_bytes(v.detokenize(tokens, remove_special, unparse_special));
            },
            "tokens"_a, nb::kw_only(), "remove_special"_a = false, "unparse_special"_a = false,
            "The bytes of a token list.")
        .def("text", &Vocab::text, "token"_a, "The token as the vocabulary spells it.")
        .def("score", &Vocab::score, "token"_a)
        .def("is_eog", &Vocab::is_eog, "token"_a)
        .def("is_control", &Vocab::is_control, "token"_a);
    for (const char *name : {"bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid"}) {
        special(c, name);
    }
}
