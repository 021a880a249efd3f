#include "python_tag.hpp"

#include <algorithm>
#include <cctype>
#include <iterator>

#include "json.h"

namespace kvasir {
namespace {

constexpr const char *TURN_ENDS[] = {"<|eom_id|>", "<|eot_id|>"};

std::string quoted(const std::string &text) { return common_json(text).dump(); }

// One pass over the text between the parentheses. What is incomplete at its end is left for later.
class Arguments {
  public:
    Arguments(const std::string &text, size_t at, PythonCall &call) : text_(text), at_(at), call_(call) {
        call_.arguments = "{";
        call_.end = at_;
    }

    void read() {
        while (call_.valid && !call_.whole) {
            skip_space();
            if (ended()) return;
            if (text_[at_] == ')') return close();
            std::string key, value;
            if (!read_key(key) || !read_value(value)) return;
            call_.arguments += (call_.arguments == "{" ? "" : ",") + quoted(key) + ":" + value;
            call_.end = at_;
            skip_space();
            if (!ended() && text_[at_] == ',') ++at_;
        }
    }

  private:
    bool ended() const { return at_ >= text_.size(); }
    bool refuse() { return call_.valid = false; }

    void skip_space() {
        while (!ended() && std::isspace(static_cast<unsigned char>(text_[at_]))) {
            ++at_;
        }
    }

    void close() {
        ++at_;
        call_.arguments += "}";
        call_.end = at_;
        call_.whole = true;
        skip_space();
        if (!ended()) refuse();
    }

    bool read_key(std::string &key) {
        while (!ended() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_')) {
            key += text_[at_++];
        }
        skip_space();
        if (ended()) return false;
        if (key.empty() || text_[at_] != '=') return refuse();
        ++at_;
        skip_space();
        return !ended();
    }

    bool read_value(std::string &value) {
        return text_[at_] == '"' || text_[at_] == '\'' ? read_string(value) : read_bare(value);
    }

    bool read_string(std::string &value) {
        const char quote = text_[at_++];
        std::string plain;
        for (; !ended() && text_[at_] != quote; ++at_) {
            if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
                ++at_;
                plain += text_[at_] == 'n' ? '\n' : text_[at_] == 't' ? '\t' : text_[at_];
            } else {
                plain += text_[at_];
            }
        }
        if (ended()) return false;
        ++at_;
        value = quoted(plain);
        return true;
    }

    bool read_bare(std::string &value) {
        const size_t end = text_.find_first_of(",) \n", at_);
        if (end == std::string::npos) return false;
        value = text_.substr(at_, end - at_);
        if (value == "True" || value == "False") value[0] = static_cast<char>(std::tolower(value[0]));
        if (value == "None") value = "null";
        try {
            common_json::parse(value);
        } catch (const std::exception &) {
            return refuse();
        }
        at_ = end;
        return true;
    }

    const std::string &text_;
    size_t at_;
    PythonCall &call_;
};

}  // namespace

PythonCall read_python_call(const std::string &text, const std::string &code_tool, bool closed) {
    PythonCall call;
    const size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
    size_t at = begin;
    while (at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) || text[at] == '_')) {
        ++at;
    }
    const std::string opening = ".call(";
    const std::string rest = text.substr(at, opening.size());
    call.valid = true;
    if (at > begin && rest == opening) {
        call.name = text.substr(begin, at - begin);
        Arguments(text, at + opening.size(), call).read();
    } else if (!closed && opening.compare(0, rest.size(), rest) == 0) {
        return call;  // undecided
    } else if (!code_tool.empty()) {
        const std::string code = quoted(text.substr(begin));
        call.name = code_tool;
        call.arguments = "{\"code\":" + (closed ? code + "}" : code.substr(0, code.size() - 1));
        call.end = text.size();
        call.whole = closed;
    } else {
        call.valid = false;
    }
    return call;
}

size_t find_turn_end(const std::string &text, size_t from) {
    size_t first = std::string::npos;
    for (const char *end : TURN_ENDS) {
        first = std::min(first, text.find(end, from));
    }
    return first;
}

size_t n_held(const std::string &text, size_t from) {
    const std::string markers[] = {PYTHON_TAG, TURN_ENDS[0], TURN_ENDS[1]};
    const size_t at = text.rfind('<');
    if (at == std::string::npos || at < from) return 0;
    const size_t n = text.size() - at;
    const bool held = std::any_of(std::begin(markers), std::end(markers), [&](const std::string &marker) {
        return n < marker.size() && marker.compare(0, n, text, at, n) == 0;
    });
    return held ? n : 0;
}

}  // namespace kvasir
