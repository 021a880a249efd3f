// Looks at a text's brackets before a parser does that recurses: one that is all brackets overflows its stack.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

namespace kvasir {

constexpr size_t MAX_NESTING = 200;  // a few hundred bytes of stack a level, and threads with 512 KiB exist

// The text without what is quoted, and for GBNF without character classes and comments.
inline std::string bare(const std::string &text, bool gbnf) {
    std::string out;
    char until = 0;  // the character that ends what is being left out
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (until != 0) {
            if (c == '\\' && until != '\n') ++i;
            if (c == until) until = 0;
        } else if (c == '"') {
            until = '"';
        } else if (gbnf && (c == '[' || c == '#')) {
            until = c == '[' ? ']' : '\n';
        } else {
            out += c;
        }
    }
    return out;
}

inline size_t deepest_nesting(const std::string &bare_text, const char *open, const char *close) {
    size_t depth = 0, deepest = 0;
    for (const char c : bare_text) {
        if (c != 0 && std::strchr(open, c)) deepest = std::max(deepest, ++depth);
        if (c != 0 && depth > 0 && std::strchr(close, c)) --depth;
    }
    return deepest;
}

}  // namespace kvasir
