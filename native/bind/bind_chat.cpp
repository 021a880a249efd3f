#include <nanobind/stl/tuple.h>

#include "../core/chat.hpp"
#include "bind.hpp"

using kvasir::ChatCall;
using kvasir::ChatDelta;
using kvasir::ChatParser;
using kvasir::ChatPrompt;
using kvasir::ChatRequest;
using kvasir::ChatTemplate;
using kvasir::Model;

namespace {

ChatPrompt render(const ChatTemplate &self, const std::string &messages, const std::string &tools,
                  const std::string &tool_choice, bool parallel_tool_calls, const std::string &json_schema,
                  bool enable_thinking, bool add_generation_prompt, bool continue_final,
                  const std::map<std::string, std::string> &kwargs) {
    ChatRequest request;
    request.messages = messages;
    request.tools = tools;
    request.tool_choice = tool_choice;
    request.parallel_tool_calls = parallel_tool_calls;
    request.json_schema = json_schema;
    request.enable_thinking = enable_thinking;
    request.add_generation_prompt = add_generation_prompt;
    request.continue_final = continue_final;
    request.kwargs = kwargs;
    return self.render(request);
}

std::vector<std::tuple<std::string, std::string, std::string>> tool_calls(const ChatParser &self) {
    std::vector<std::tuple<std::string, std::string, std::string>> out;
    for (const ChatCall &call : self.tool_calls()) {
        out.emplace_back(call.id, call.name, call.arguments);
    }
    return out;
}

}  // namespace

void bind_chat(nb::module_ &m) {
    nb::class_<ChatPrompt>(m, "ChatPrompt", "A rendered prompt, and what its reply will look like.")
        .def_ro("prompt", &ChatPrompt::prompt)
        .def_ro("grammar", &ChatPrompt::grammar)
        .def_ro("grammar_lazy", &ChatPrompt::grammar_lazy)
        .def_ro("grammar_triggers", &ChatPrompt::grammar_triggers,
                "(kind, value, token or -1); the kinds are word, pattern, pattern_full and token.")
        .def_ro("preserved_tokens", &ChatPrompt::preserved_tokens,
                "Special tokens that the parser must see as text, where they are one token of the vocabulary.")
        .def_ro("stops", &ChatPrompt::stops)
        .def_ro("generation_prompt", &ChatPrompt::generation_prompt)
        .def_ro("format", &ChatPrompt::format)
        .def_ro("thinking_start", &ChatPrompt::thinking_start)
        .def_ro("thinking_ends", &ChatPrompt::thinking_ends)
        .def_ro("supports_thinking", &ChatPrompt::supports_thinking)
        .def("constrain", &ChatPrompt::constrain, "params"_a, "vocab"_a,
             "Gives a sampler this prompt's grammar with its triggers, and the tokens of its thinking markers. A word "
             "that is one token triggers as that token. reasoning_budget stays as it is; reasoning_forced becomes the "
             "first end marker.");

    nb::class_<ChatTemplate>(m, "ChatTemplate", "How a model spells messages. Without a model it needs a source.")
        .def(
            "__init__",
            [](ChatTemplate *self, const Model *model, const std::string &source, const std::string &bos_token,
               const std::string &eos_token) {
                const nb::gil_scoped_release unlocked;
                new (self) ChatTemplate(model, source, bos_token, eos_token);
            },
            "model"_a = nb::none(), "source"_a = "", nb::kw_only(), "bos_token"_a = "", "eos_token"_a = "")
        .def_prop_ro("explicit", &ChatTemplate::is_explicit,
                     "False where the model brings no template and none was given: ChatML stands in for it.")
        .def_prop_ro("source", &ChatTemplate::source)
        .def_prop_ro("caps", &ChatTemplate::caps, "What the template can show: supports_tools, supports_tool_calls...")
        .def("render", &render, "messages"_a, nb::kw_only(), "tools"_a = "", "tool_choice"_a = "auto",
             "parallel_tool_calls"_a = false, "json_schema"_a = "", "enable_thinking"_a = true,
             "add_generation_prompt"_a = true, "continue_final"_a = false,
             "kwargs"_a = std::map<std::string, std::string>(), Unlocked(),
             "The prompt for messages and tools in OpenAI's shape, given as JSON text. Raises BadOption or BadSchema.");

    nb::class_<ChatDelta>(m, "ChatDelta", "What a piece of a reply added: 'content', 'reasoning' or 'tool_call'.")
        .def_ro("kind", &ChatDelta::kind)
        .def_ro("text", &ChatDelta::text)
        .def_ro("index", &ChatDelta::index)
        .def_ro("id", &ChatDelta::id)
        .def_ro("name", &ChatDelta::name, "Set on the first delta of a call.");

    nb::class_<ChatParser>(m, "ChatParser",
                           "Reads one reply as it comes. What it gave is never taken back, and it never raises.")
        .def(
            "__init__",
            [](ChatParser *self, const ChatPrompt &prompt, bool continues) {
                const nb::gil_scoped_release unlocked;
                new (self) ChatParser(prompt, continues);
            },
            "prompt"_a, nb::kw_only(), "continues"_a = false)
        .def("feed", &ChatParser::feed, "text"_a, Unlocked(), "Takes the text that came; what it makes certain.")
        .def("finish", &ChatParser::finish, Unlocked(), "The rest, at the end of the reply.")
        .def_prop_ro("content", &ChatParser::content, Unlocked())
        .def_prop_ro("reasoning", &ChatParser::reasoning, Unlocked())
        .def_prop_ro("tool_calls", &tool_calls, Unlocked(), "The calls so far: id, name, arguments as JSON text.")
        .def_prop_ro("rejected", &ChatParser::rejected, Unlocked(),
                     "Whether the reply left the expected form: from there on all text is content.");
}
