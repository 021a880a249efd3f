// How deep brackets nest in a text, because parsers that recurse overflow the stack where a text is all brackets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

namespace kvasir {

constexpr size_t MAX_NESTING = 200;  // a few hundred bytes of stack a level, and threads with 512 KiB exist

// `open` and `close` name the brackets. Quoted text is skipped, and for GBNF character classes and comments too.
inline size_t deepest_nesting(const std::string &text, const char *open, const char *close, bool gbnf) {
    size_t depth = 0, deepest = 0;
    char until = 0;  // the character that ends what is being skipped
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (until != 0) {
            if (c == '\\' && until != '\n') ++i;
            if (c == until) until = 0;
        } else if (c == '"') {
            until = '"';
        } else if (gbnf && c == '[') {
            until = ']';
        } else if (gbnf && c == '#') {
            until = '\n';
        } else if (c != 0 && std::strchr(open, c)) {
            deepest = std::max(deepest, ++depth);
        } else if (c != 0 && std::strchr(close, c)) {
            depth -= depth > 0 ? 1 : 0;
        }
    }
    return deepest;
}

}  // namespace kvasir
