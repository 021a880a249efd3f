// Calls as Llama 3 writes them to its own tools: <|python_tag|>name.call(key="value")<|eom_id|>, or a piece of Python.
//
// llama.cpp's parsers know the JSON that may follow the tag and not this. Pure: text in, a call out.
#pragma once

#include <string>

namespace kvasir {

constexpr const char *PYTHON_TAG = "<|python_tag|>";

struct PythonCall {
    bool valid = false;           // the text is such a call, or may become one
    bool whole = false;           // nothing is missing
    std::string name, arguments;  // as far as they came; no name: undecided
    size_t end = 0;               // how much of the text they account for
};

// `code_tool` names the tool that runs Python, where there is one. `closed`: no more text will come.
PythonCall read_python_call(const std::string &text, const std::string &code_tool, bool closed);

// Where the turn ends in a text that shows its end token; npos where it goes on.
size_t find_turn_end(const std::string &text, size_t from);

// How many bytes at the end of a text may be the start of the tag or of an end token.
size_t n_held(const std::string &text, size_t from);

}  // namespace kvasir
