#include <algorithm>
#include <cctype>
#include <random>

#include "chat-peg-parser.h"
#include "chat.hpp"
#include "error.hpp"
#include "json.h"
#include "python_tag.hpp"
#include "reply_form.hpp"
#include "runtime.hpp"

namespace kvasir {
namespace {

// A prefix of a good reply may be unreadable for a moment, while a marker is half there. None of them is longer.
constexpr size_t PATIENCE_BYTES = 48;

// llama.cpp's parser recurses into JSON, about 4 KB of stack a level, and threads with 512 KB exist.
constexpr size_t MAX_OPEN_BRACKETS = 64;

using Tags = common_chat_peg_builder;

enum class Last { Nothing, Reasoning, Content, Call, Closed };

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

bool all_space(const std::string &text, size_t from) {
    return std::all_of(text.begin() + static_cast<std::ptrdiff_t>(from), text.end(), is_space);
}

size_t skip_space(const std::string &text, size_t at) {
    while (at < text.size() && is_space(text[at])) {
        ++at;
    }
    return at;
}

// Held back until more follows: the white space next to a thinking marker belongs to the template.
std::string trimmed(const std::string &text) {
    size_t end = text.size();
    while (end > 0 && is_space(text[end - 1])) {
        --end;
    }
    const size_t begin = skip_space(text, 0);
    return begin < end ? text.substr(begin, end - begin) : "";
}

bool starts_with(const std::string &text, const std::string &head) { return text.compare(0, head.size(), head) == 0; }

// Nine letters and digits: the templates of Mistral refuse any other id.
std::string random_id() {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    thread_local std::mt19937_64 random{std::random_device{}()};
    std::string id(9, ' ');
    for (char &c : id) {
        c = letters[random() % (sizeof letters - 1)];
    }
    return id;
}

bool is_json(const std::string &text) {
    try {
        common_json::parse(text);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

ChatReply mapped(common_chat_format format, const common_peg_ast_arena &ast, const common_peg_parse_result &result) {
    common_chat_msg message;
    if (format == COMMON_CHAT_FORMAT_PEG_GEMMA4) {
        common_chat_peg_gemma4_mapper(message).from_ast(ast, result);
    } else if (format == COMMON_CHAT_FORMAT_PEG_MINIMAX_M3) {
        common_chat_peg_minimax_m3_mapper(message).from_ast(ast, result);
    } else {
        common_chat_peg_mapper(message).from_ast(ast, result);
    }
    ChatReply reply;
    reply.reasoning = trimmed(message.reasoning_content);
    reply.content = std::move(message.content);
    for (common_chat_tool_call &call : message.tool_calls) {
        reply.calls.push_back({std::move(call.id), std::move(call.name), std::move(call.arguments)});
    }
    return reply;
}

}  // namespace

// One reading of an input, and how much of it the reply accounts for: what lies behind `end` was held back.
struct ChatParser::Reading {
    ChatReply reply;
    size_t end = 0;
    Last last = Last::Nothing;
    bool in_call = false;
    bool complete = false;  // it could end here

    void note(size_t at, Last what) {
        if (at > end || (at == end && (what == Last::Closed || last == Last::Nothing))) {
            end = at;
            last = what;
        }
    }

    void locate(const common_peg_ast_arena &ast, const common_peg_parse_result &result) {
        bool named = false;
        ast.visit(result, [&](const common_peg_ast_node &node) {
            if (node.tag == Tags::CONTENT) note(node.end, Last::Content);
            if (node.tag == Tags::REASONING) note(node.end, Last::Reasoning);
            if (node.tag == Tags::REASONING_BLOCK && !node.is_partial) note(node.end, Last::Closed);
            if (node.tag.compare(0, 4, "tool") != 0) return;
            in_call = node.is_partial;
            if (node.tag == Tags::TOOL_OPEN) named = false;
            if (node.tag == Tags::TOOL_NAME) named = true;
            const bool closes = node.tag == Tags::TOOL_CLOSE || (node.tag == Tags::TOOL && !node.is_partial);
            if (closes) {
                note(node.end, Last::Closed);
            } else if (named && node.tag != Tags::TOOL) {
                note(node.end, Last::Call);
            }
        });
    }
};

ChatParser::ChatParser(const ChatPrompt &prompt, bool continues) : form_(prompt.form) {
    ensure_backend();
    input_ = form_->generation_prompt;
    n_good_ = input_.size();
    Reading before;
    const bool echoes = form_->continued && !continues;
    if (!echoes && read(input_, false, before)) given_ = base_ = before.reply;
}

std::vector<ChatDelta> ChatParser::feed(const std::string &text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return {};
    input_ += text;
    if (rejected_ || finished_) {
        append("content", given_.content, text);
        return deltas();
    }
    const size_t end = form_->python_tag ? find_turn_end(input_, form_->generation_prompt.size()) : std::string::npos;
    ended_ = end != std::string::npos;
    if (ended_) input_.resize(end);
    count_brackets(text);
    if (!goes_on(text)) advance();
    return deltas();
}

// Text without the first byte of any marker belongs to what it follows. Nearly every token is such a text, and reading
// the whole reply again for each would take longer the longer it is.
bool ChatParser::goes_on(const std::string &text) {
    const auto is_sign = [&](char c) { return form_->signs.test(static_cast<unsigned char>(c)); };
    if (!open_ || ended_ || std::any_of(text.begin(), text.end(), is_sign)) return false;
    const bool thinks = open_ == &given_.reasoning;
    size_t end = input_.size();
    while (thinks && end > n_given_ && is_space(input_[end - 1])) {
        --end;
    }
    append(thinks ? "reasoning" : "content", *open_, input_.substr(n_given_, end - n_given_));
    n_given_ = end;
    return true;
}

// Where the last reading ended, and whether plain text may simply follow.
void ChatParser::remember(const Reading &reading) {
    n_good_ = input_.size();
    n_given_ = std::min(reading.end, input_.size());
    open_ = reading.last == Last::Content     ? &given_.content
            : reading.last == Last::Reasoning ? &given_.reasoning
                                              : nullptr;
    if (!open_ || open_->empty() || reading.end != input_.size()) open_ = nullptr;
    while (open_ == &given_.reasoning && n_given_ > 0 && is_space(input_[n_given_ - 1])) {
        --n_given_;
    }
}

// A line that does not begin as one of JSON can is prose: no JSON goes on across it.
void ChatParser::count_brackets(const std::string &text) {
    const std::string json_lines = "{}[]\"'-0123456789tfnTFN,:";
    for (const char c : text) {
        if (depth_ > MAX_OPEN_BRACKETS) return;
        if (c == '\n') {
            line_begins_ = true;
        } else if (line_begins_ && !is_space(c)) {
            if (json_lines.find(c) == std::string::npos) depth_ = 0;
            line_begins_ = false;
        }
        if (c == '{' || c == '[') ++depth_;
        if ((c == '}' || c == ']') && depth_ > 0) --depth_;
    }
}

std::vector<ChatDelta> ChatParser::finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!rejected_ && !finished_) close();
    finished_ = true;
    return deltas();
}

void ChatParser::advance() {
    Reading reading;
    if (depth_ > MAX_OPEN_BRACKETS) {
        fits(input_.substr(0, n_good_), false, reading);
        reject(reading);
    } else if (fits(input_, false, reading)) {
        take(reading);
        remember(reading);
    } else {
        open_ = nullptr;
        n_good_ = longest_fitting(reading);
        take(reading);
        if (input_.size() - n_good_ > PATIENCE_BYTES) reject(reading);
    }
}

// At the end nothing is held back any more. Read as a whole first; else what the last reading left over is text.
void ChatParser::close() {
    Reading reading;
    if (fits(input_, true, reading)) return take(reading);
    if (!fits(input_, false, reading)) {
        longest_fitting(reading);
        take(reading);
        return reject(reading);
    }
    take(reading);
    if (reading.last == Last::Closed) skip_closing(reading, input_.size());
    const size_t from = std::min(reading.end, input_.size());
    if (reading.last == Last::Call && is_json(given_.calls.back().arguments)) return;  // only its closing is missing
    if (all_space(input_, from)) {
        rejected_ = reading.in_call;
    } else if (reading.last == Last::Reasoning && !closes_thinking(from)) {
        append("reasoning", given_.reasoning, input_.substr(from));
    } else {
        reject(reading);
        rejected_ = reading.in_call;
    }
}

// Whether an input has the form and takes back nothing of what was given.
bool ChatParser::fits(const std::string &input, bool whole, Reading &out) const {
    if (!read(input, whole, out)) return false;
    const ChatReply &now = out.reply;
    bool same = starts_with(now.reasoning, given_.reasoning) && starts_with(now.content, given_.content) &&
                now.calls.size() >= given_.calls.size();
    for (size_t i = 0; same && i < given_.calls.size(); ++i) {
        same =
            now.calls[i].name == given_.calls[i].name && starts_with(now.calls[i].arguments, given_.calls[i].arguments);
    }
    return same;
}

// False where the input does not have the form, or goes on behind it.
bool ChatParser::read(const std::string &input, bool whole, Reading &out) const {
    try {
        return form_->python_tag ? read_tagged(input, whole, out) : parse(input, whole, out);
    } catch (const std::exception &) {
        return false;
    }
}

// Llama 3's tag is no text, it only says that a call follows.
bool ChatParser::read_tagged(const std::string &input, bool whole, Reading &out) const {
    const size_t from = std::min(form_->generation_prompt.size(), input.size());
    const std::string text = input.substr(0, input.size() - (whole ? 0 : n_held(input, from)));
    const size_t tag = text.find(PYTHON_TAG, from);
    return tag == std::string::npos ? parse(text, whole, out) : read_python(text, tag, whole, out);
}

bool ChatParser::read_python(const std::string &text, size_t tag, bool whole, Reading &out) const {
    const size_t begin = tag + std::string(PYTHON_TAG).size();
    const size_t body = skip_space(text, begin);
    if (body < text.size() && text[body] == '{') {
        const bool good = parse(text.substr(0, tag) + text.substr(body), whole, out);
        if (out.end > tag) out.end += body - tag;
        return good;
    }
    if (!parse(text.substr(0, tag), false, out)) return false;
    const PythonCall call = read_python_call(text.substr(begin), form_->code_tool, whole);
    out.in_call = !call.whole;
    if (!call.name.empty()) {
        out.reply.calls.push_back({"", call.name, call.arguments});
        out.note(begin + call.end, call.whole ? Last::Closed : Last::Call);
    }
    return call.valid && (call.whole || !whole);
}

bool ChatParser::parse(const std::string &input, bool whole, Reading &out) const {
    out = Reading();
    out.end = std::min(form_->generation_prompt.size(), input.size());
    if (form_->arena.empty()) {
        out.reply.content = input.substr(out.end);
        out.note(input.size(), Last::Content);
        return true;
    }
    bool readable = false;
    with_abort_trap(Kind::BadOption, "reading a reply", [&] {
        common_peg_parse_context context(input, whole ? COMMON_PEG_PARSE_FLAG_NONE : COMMON_PEG_PARSE_FLAG_LENIENT);
        const common_peg_parse_result result = form_->arena.parse(context);
        if (result.fail() || (result.success() && !all_space(input, result.end))) return;
        out.reply = mapped(form_->format, context.ast, result);
        out.locate(context.ast, result);
        out.complete = result.success() && out.last != Last::Nothing;
        if (out.complete) out.note(result.end, Last::Closed);
        readable = true;
    });
    return readable;
}

// Where the form was left does not depend on how the text was cut into pieces.
size_t ChatParser::longest_fitting(Reading &out) const {
    size_t good = n_good_, bad = input_.size();
    while (bad - good > 1) {
        const size_t middle = good + (bad - good) / 2;
        (fits(input_.substr(0, middle), false, out) ? good : bad) = middle;
    }
    fits(input_.substr(0, good), false, out);
    skip_closing(out, good);
    return good;
}

// What looked like the start of one more call is text; the end of the last whole reply is not.
void ChatParser::skip_closing(Reading &reading, size_t n_read) const {
    Reading earlier;
    for (size_t n = n_read; n > reading.end && n_read - n < PATIENCE_BYTES; --n) {
        if (fits(input_.substr(0, n), false, earlier) && earlier.complete) {
            reading.end = n;
            return;
        }
    }
}

void ChatParser::take(const Reading &reading) {
    grow("reasoning", given_.reasoning, reading.reply.reasoning);
    grow("content", given_.content, reading.reply.content);
    for (size_t i = 0; i < reading.reply.calls.size(); ++i) {
        grow_call(i, reading.reply.calls[i]);
    }
}

// From here on all is content. The marker that ends the thinking is not: it belongs to what was given.
void ChatParser::reject(const Reading &reading) {
    size_t from = std::min(std::max(reading.end, n_given_), input_.size());
    if (reading.last == Last::Reasoning) from += closes_thinking(from);
    rejected_ = true;
    append("content", given_.content, input_.substr(from));
}

size_t ChatParser::closes_thinking(size_t at) const {
    const size_t begin = skip_space(input_, at);
    for (const std::string &end : form_->thinking_ends) {
        if (input_.compare(begin, end.size(), end) == 0) {
            return skip_space(input_, begin + end.size()) - at;
        }
    }
    return 0;
}

void ChatParser::grow(const char *kind, std::string &given, const std::string &text) {
    if (text.size() > given.size()) append(kind, given, text.substr(given.size()));
}

void ChatParser::append(const char *kind, std::string &given, const std::string &text) {
    if (text.empty()) return;
    pending_.push_back({kind, text, 0, "", ""});
    given += text;
}

void ChatParser::grow_call(size_t index, const ChatCall &call) {
    const auto number = static_cast<int32_t>(index - base_.calls.size());
    if (index >= given_.calls.size()) {
        given_.calls.push_back({call.id.empty() ? random_id() : call.id, call.name, call.arguments});
        pending_.push_back({"tool_call", call.arguments, number, given_.calls[index].id, call.name});
        return;
    }
    ChatCall &given = given_.calls[index];
    if (call.arguments.size() <= given.arguments.size()) return;
    pending_.push_back({"tool_call", call.arguments.substr(given.arguments.size()), number, given.id, ""});
    given.arguments = call.arguments;
}

std::vector<ChatDelta> ChatParser::deltas() {
    std::vector<ChatDelta> out;
    out.swap(pending_);
    return out;
}

std::string ChatParser::content() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return given_.content.substr(base_.content.size());
}

std::string ChatParser::reasoning() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return given_.reasoning.substr(base_.reasoning.size());
}

std::vector<ChatCall> ChatParser::tool_calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {given_.calls.begin() + static_cast<std::ptrdiff_t>(base_.calls.size()), given_.calls.end()};
}

bool ChatParser::rejected() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return rejected_;
}

}  // namespace kvasir
