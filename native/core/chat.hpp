// Messages to a prompt and a reply to its parts, through llama.cpp's templates and parsers; strings and JSON outside.
//
// llama-common's headers change weekly: no name of theirs leaves chat.cpp and chat_parser.cpp. A template is shared
// freely between threads. A parser never raises and takes nothing back: where the reply stops having the form that
// was expected, the rest of it is content.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "model.hpp"
#include "sampler.hpp"

struct common_chat_templates;

namespace kvasir {

struct ReplyForm;  // what llama.cpp's parser needs to read a reply

struct ChatPrompt {
    std::string prompt, grammar;
    bool grammar_lazy = false;
    std::vector<std::tuple<std::string, std::string, llama_token>> grammar_triggers;  // kind, value, token or -1
    std::vector<std::string> preserved_tokens, stops;
    std::string generation_prompt, format, thinking_start;
    std::vector<std::string> thinking_ends;
    bool supports_thinking = false;
    std::shared_ptr<const ReplyForm> form;

    // Gives a sampler the grammar with its triggers and the tokens of the thinking markers; not the budget itself.
    void constrain(SamplerParams &params, const Vocab &vocab) const;
};

struct ChatRequest {
    std::string messages, tools, tool_choice = "auto", json_schema;
    bool parallel_tool_calls = false, enable_thinking = true, add_generation_prompt = true, continue_final = false;
    std::map<std::string, std::string> kwargs;
};

class ChatTemplate {
  public:
    ChatTemplate(const Model *model, const std::string &source, const std::string &bos_token,
                 const std::string &eos_token);

    bool is_explicit() const;
    std::string source() const;
    std::map<std::string, bool> caps() const;
    ChatPrompt render(const ChatRequest &request) const;

  private:
    std::shared_ptr<const common_chat_templates> templates_;
    std::shared_ptr<const common_chat_templates> bare_;  // knows no BOS and EOS; null where they are never printed
};

struct ChatDelta {
    std::string kind, text;
    int32_t index = 0;
    std::string id, name;
};

struct ChatCall {
    std::string id, name, arguments;
};

struct ChatReply {
    std::string reasoning, content;
    std::vector<ChatCall> calls;
};

class ChatParser {
  public:
    ChatParser(const ChatPrompt &prompt, bool continues);

    std::vector<ChatDelta> feed(const std::string &text);
    std::vector<ChatDelta> finish();

    std::string content() const;
    std::string reasoning() const;
    std::vector<ChatCall> tool_calls() const;
    bool rejected() const;

  private:
    struct Reading;

    void count_brackets(const std::string &text);
    bool goes_on(const std::string &text);
    void advance();
    void close();
    bool read(const std::string &input, bool whole, Reading &out) const;
    bool read_tagged(const std::string &input, bool whole, Reading &out) const;
    bool read_python(const std::string &text, size_t tag, bool whole, Reading &out) const;
    bool parse(const std::string &input, bool whole, Reading &out) const;
    bool fits(const std::string &input, bool whole, Reading &out) const;
    size_t longest_fitting(Reading &out) const;
    void skip_closing(Reading &reading, size_t n_read) const;
    void take(const Reading &reading);
    void reject(const Reading &reading);
    size_t closes_thinking(size_t at) const;  // how long the end marker is that stands here, 0 for none
    void remember(const Reading &reading);
    void grow(const char *kind, std::string &given, const std::string &text);
    void append(const char *kind, std::string &given, const std::string &text);
    void grow_call(size_t index, const ChatCall &call);
    std::vector<ChatDelta> deltas();

    std::shared_ptr<const ReplyForm> form_;
    std::string input_;       // the generation prompt, then all that came
    ChatReply given_, base_;  // base_: what the prompt itself had said already
    std::vector<ChatDelta> pending_;
    std::string *open_ = nullptr;  // the part of given_ that the input ends in, where more of it may follow
    size_t n_given_ = 0;           // how much of the input that part accounts for
    size_t n_good_ = 0;            // a prefix of the input that fits the form
    size_t depth_ = 0;             // brackets open at the end of the input
    bool line_begins_ = true;
    bool rejected_ = false, finished_ = false;
    bool ended_ = false;  // the text showed the end token of its turn
    mutable std::mutex mutex_;
};

}  // namespace kvasir
