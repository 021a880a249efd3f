#include "chat.h"

#include <algorithm>
#include <cctype>

#include "chat.hpp"
#include "error.hpp"
#include "json.h"
#include "nesting.hpp"
#include "python_tag.hpp"
#include "reply_form.hpp"
#include "runtime.hpp"
#include "schema.hpp"

namespace kvasir {
namespace {

[[noreturn]] void bad(const std::string &message) { throw Error(Kind::BadOption, message); }

// "...While executing X at line 3, column 9 in source:\n<the source>\nError: Jinja Exception: why" -> "why"
std::string short_reason(const std::string &what) {
    std::string reason = what;
    for (const char *before : {"Error: ", "Jinja Exception: "}) {
        const size_t at = reason.rfind(before);
        if (at != std::string::npos) reason.erase(0, at + std::string(before).size());
    }
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    while (!reason.empty() && (reason.back() == ' ' || reason.back() == '.')) {
        reason.pop_back();
    }
    return reason.empty() ? "it gave no reason" : reason;
}

// Jinja's parser and its statements recurse: a source that is all brackets or all ifs overflows the stack.
void check_source(const std::string &source) {
    if (deepest_nesting(source, "([{", ")]}") > MAX_NESTING) {
        bad("the chat template nests more than " + std::to_string(MAX_NESTING) + " brackets; give another.");
    }
    size_t depth = 0;
    for (size_t at = source.find("{%"); at != std::string::npos; at = source.find("{%", at + 2)) {
        const size_t word = source.find_first_not_of("-+ \t\r\n", at + 2);
        if (word == std::string::npos) return;
        const auto begins = [&](const char *text) { return source.compare(word, std::string(text).size(), text) == 0; };
        if (begins("end")) {
            depth -= depth > 0 ? 1 : 0;
        } else if ((begins("if") || begins("for") || begins("macro") || begins("call") || begins("filter")) &&
                   ++depth > MAX_NESTING) {
            bad("the chat template nests more than " + std::to_string(MAX_NESTING) + " blocks; give another.");
        }
    }
}

// llama.cpp's init throws a copy of the base class, without the reason: parse again to learn it.
std::string parse_failure(const std::string &source) {
    try {
        const common_chat_template again(source, "", "");
    } catch (const std::exception &e) {
        return short_reason(e.what());
    }
    return "it could not be parsed";
}

common_json parse_json(const std::string &what, const std::string &text) {
    if (deepest_nesting(bare(text, false), "{[", "}]") > MAX_NESTING) {
        bad(what + " nests more than " + std::to_string(MAX_NESTING) + " levels; make it flatter.");
    }
    try {
        return common_json::parse(text);
    } catch (const std::exception &e) {
        bad(what + " must be JSON text: " + short_reason(e.what()) + ".");
    }
}

common_chat_templates_inputs inputs_of(const ChatRequest &request) {
    common_chat_templates_inputs in;
    try {
        in.tool_choice = common_chat_tool_choice_parse_oaicompat(request.tool_choice);
    } catch (const std::exception &) {
        bad("tool_choice must be one of none, auto, required; got '" + request.tool_choice + "'.");
    }
    const common_json messages = parse_json("messages", request.messages);
    const common_json tools = request.tools.empty() ? common_json::array() : parse_json("tools", request.tools);
    try {
        in.messages = common_chat_msgs_parse_oaicompat(messages);
        in.tools = common_chat_tools_parse_oaicompat(tools);
    } catch (const std::exception &e) {
        bad("these messages or tools do not have OpenAI's shape: " + short_reason(e.what()) + ".");
    }
    for (const common_chat_tool &tool : in.tools) {
        if (!tool.parameters.empty()) check_schema_limits(tool.parameters);  // raises BadSchema
    }
    if (request.continue_final && (in.messages.empty() || in.messages.back().role != "assistant")) {
        bad("only a final message of the assistant can be continued; end the messages with one.");
    }
    for (const auto &[name, text] : request.kwargs) {
        parse_json("template argument '" + name + "'", text);
    }
    if (!request.json_schema.empty()) json_schema_to_gbnf(request.json_schema);  // raises BadSchema
    in.chat_template_kwargs = request.kwargs;
    in.json_schema = request.json_schema;
    in.parallel_tool_calls = request.parallel_tool_calls;
    in.enable_thinking = request.enable_thinking;
    in.add_generation_prompt = request.add_generation_prompt;
    in.continue_final_message = request.continue_final ? COMMON_CHAT_CONTINUATION_AUTO : COMMON_CHAT_CONTINUATION_NONE;
    in.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;  // NONE would leave the reasoning in the content
    return in;
}

// A render fails for the messages or for a tool's schema; only the second is a BadSchema.
void check_schemas(const std::vector<common_chat_tool> &tools) {
    for (const common_chat_tool &tool : tools) {
        try {
            if (!tool.parameters.empty()) json_schema_to_gbnf(tool.parameters);
        } catch (const Error &e) {
            throw Error(Kind::BadSchema, "tool '" + tool.name + "': " + e.what());
        }
    }
}

std::tuple<std::string, std::string, llama_token> trigger_of(const common_grammar_trigger &trigger) {
    switch (trigger.type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:
            return {"token", trigger.value, trigger.token};
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:
            return {"word", trigger.value, -1};
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
            return {"pattern", trigger.value, -1};
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL:
            return {"pattern_full", trigger.value, -1};
    }
    return {"word", trigger.value, -1};
}

// Llama 3's template spells calls to its own tools in a way that llama.cpp's parser does not read.
void add_python_tag(ReplyForm &form, common_chat_params &cp, const common_chat_templates_inputs &in) {
    const auto builtin = in.chat_template_kwargs.find("builtin_tools");
    const bool has_builtin = builtin != in.chat_template_kwargs.end();
    if (in.tool_choice == COMMON_CHAT_TOOL_CHOICE_NONE || (in.tools.empty() && !has_builtin)) return;
    form.python_tag = true;
    cp.preserved_tokens.emplace_back(PYTHON_TAG);
    for (const char *name : {"python", "ipython", "code_interpreter"}) {
        const bool offered = std::any_of(in.tools.begin(), in.tools.end(),
                                         [&](const common_chat_tool &tool) { return tool.name == name; });
        if (offered || (has_builtin && builtin->second.find('"' + std::string(name) + '"') != std::string::npos)) {
            form.code_tool = name;
        }
    }
}

using Signs = std::bitset<256>;

// The parser behind names. Rules may refer to themselves, so that the way is short or given up.
common_peg_parser_id unnamed(const common_peg_arena &arena, common_peg_parser_id id) {
    for (int i = 0; i < 8; ++i) {
        if (const auto *rule = std::get_if<common_peg_rule_parser>(&arena.get(id))) {
            id = rule->child;
        } else if (const auto *ref = std::get_if<common_peg_ref_parser>(&arena.get(id))) {
            id = arena.get_rule(ref->name);
        }
    }
    return id;
}

// Adds the first bytes of what ends a part that is text up to a marker. False where it is more than that.
bool add_signs(const common_peg_arena &arena, common_peg_parser_id id, Signs &signs, bool &has_until) {
    const auto add = [&](const std::string &marker) {
        marker.empty() ? signs : signs.set(static_cast<uint8_t>(marker[0]));
    };
    const common_peg_parser_variant &parser = arena.get(id);
    if (const auto *until = std::get_if<common_peg_until_parser>(&parser)) {
        std::for_each(until->delimiters.begin(), until->delimiters.end(), add);
        return has_until = true;
    }
    if (const auto *literal = std::get_if<common_peg_literal_parser>(&parser)) {
        add(literal->literal);
        return true;
    }
    if (const auto *negated = std::get_if<common_peg_not_parser>(&parser)) {
        return add_signs(arena, negated->child, signs, has_until);
    }
    if (const auto *sequence = std::get_if<common_peg_sequence_parser>(&parser)) {
        return std::all_of(sequence->children.begin(), sequence->children.end(),
                           [&](common_peg_parser_id child) { return add_signs(arena, child, signs, has_until); });
    }
    return std::holds_alternative<common_peg_any_parser>(parser);
}

// Every byte is a sign where a part of the reply is not simply text up to a marker.
Signs signs_of(const common_peg_arena &arena) {
    Signs signs;
    signs.set('<');
    for (size_t id = 0; id < arena.size(); ++id) {
        const auto *tag = std::get_if<common_peg_tag_parser>(&arena.get(id));
        if (!tag || (tag->tag != "content" && tag->tag != "reasoning")) continue;
        bool has_until = false;
        if (!add_signs(arena, unnamed(arena, tag->child), signs, has_until) || !has_until) return signs.set();
    }
    return signs;
}

ChatPrompt prompt_of(common_chat_params &&cp, const common_chat_templates_inputs &in, const std::string &source) {
    ChatPrompt out;
    auto form = std::make_shared<ReplyForm>();
    if (source.find(PYTHON_TAG) != std::string::npos) add_python_tag(*form, cp, in);
    form->format = cp.format;
    form->generation_prompt = cp.generation_prompt;
    form->continued = in.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
    std::copy_if(cp.thinking_end_tags.begin(), cp.thinking_end_tags.end(), std::back_inserter(form->thinking_ends),
                 [](const std::string &tag) {
                     return !tag.empty() && tag.find("tool") == std::string::npos &&
                            tag.find("function") == std::string::npos;
                 });
    if (!cp.parser.empty()) form->arena.load(cp.parser);
    form->signs = signs_of(form->arena);
    out.form = std::move(form);
    out.format = common_chat_format_name(cp.format);
    out.prompt = std::move(cp.prompt);
    out.grammar = std::move(cp.grammar);
    out.grammar_lazy = cp.grammar_lazy;
    std::transform(cp.grammar_triggers.begin(), cp.grammar_triggers.end(), std::back_inserter(out.grammar_triggers),
                   trigger_of);
    out.preserved_tokens = std::move(cp.preserved_tokens);
    out.stops = std::move(cp.additional_stops);
    out.generation_prompt = std::move(cp.generation_prompt);
    out.thinking_start = std::move(cp.thinking_start_tag);
    out.thinking_ends = std::move(cp.thinking_end_tags);
    out.supports_thinking = cp.supports_thinking;
    return out;
}

// The source that is used when there are tools.
std::string with_tools(const common_chat_templates *templates) {
    const std::string variant = common_chat_templates_source(templates, "tool_use");
    return variant.empty() ? common_chat_templates_source(templates) : variant;
}

// llama.cpp learns a template's way to call from what it prints, and takes an EOS at the end for a part of the call:
// Mistral's calls would then never be recognised.
void relearn_calls(common_chat_params &cp, const common_chat_templates *bare, const common_chat_templates_inputs &in) {
    common_chat_params learned = common_chat_templates_apply(bare, in);
    if (learned.generation_prompt != cp.generation_prompt) return;
    cp.parser = std::move(learned.parser);
    cp.grammar = std::move(learned.grammar);
    cp.grammar_lazy = learned.grammar_lazy;
    cp.grammar_triggers = std::move(learned.grammar_triggers);
    cp.preserved_tokens = std::move(learned.preserved_tokens);
}

}  // namespace

ChatTemplate::ChatTemplate(const Model *model, const std::string &source, const std::string &bos_token,
                           const std::string &eos_token) {
    ensure_backend();
    if (!model && source.empty()) bad("a chat template needs a model or a source; give one of them.");
    const std::shared_ptr<ModelHandle> handle = model ? model->handle() : nullptr;
    const std::string own = source.empty() ? model->chat_template({}).value_or("") : source;
    check_source(own);
    if (source.empty()) check_source(model->chat_template("tool_use").value_or(""));
    with_abort_trap(Kind::BadOption, "parsing the chat template", [&] {
        try {
            templates_ = common_chat_templates_init(handle ? handle->model : nullptr, source, bos_token, eos_token);
            const std::string shown = with_tools(templates_.get());
            if (shown.find("eos_token") != std::string::npos) bare_ = common_chat_templates_init(nullptr, shown);
        } catch (const std::exception &) {
            bad("the chat template is not valid Jinja: " + parse_failure(own) + ". Correct it or give another.");
        }
    });
}

bool ChatTemplate::is_explicit() const { return common_chat_templates_was_explicit(templates_.get()); }

std::string ChatTemplate::source() const { return common_chat_templates_source(templates_.get()); }

std::map<std::string, bool> ChatTemplate::caps() const { return common_chat_templates_get_caps(templates_.get()); }

ChatPrompt ChatTemplate::render(const ChatRequest &request) const {
    ChatPrompt prompt;
    with_abort_trap(Kind::BadOption, "rendering the chat template", [&] {
        const common_chat_templates_inputs in = inputs_of(request);
        try {
            common_chat_params cp = common_chat_templates_apply(templates_.get(), in);
            if (bare_ && !in.tools.empty()) relearn_calls(cp, bare_.get(), in);
            prompt = prompt_of(std::move(cp), in, with_tools(templates_.get()));
        } catch (const std::exception &e) {
            check_schemas(in.tools);
            bad("the chat template does not take these messages: " + short_reason(e.what()) + ".");
        }
    });
    return prompt;
}

void ChatPrompt::constrain(SamplerParams &params, const Vocab &vocab) const {
    const auto tokens = [&](const std::string &text) { return vocab.tokenize(text, false, true); };
    params.grammar = grammar;
    params.grammar_lazy = grammar_lazy;
    params.grammar_trigger_patterns.clear();
    params.grammar_trigger_tokens.clear();
    for (const auto &[kind, value, token] : grammar_triggers) {
        const auto ids = kind == "word" ? tokens(value) : std::vector<llama_token>();
        if (kind == "token" || ids.size() == 1) {
            params.grammar_trigger_tokens.push_back(kind == "token" ? token : ids[0]);
        } else if (kind == "pattern_full") {
            const std::string head = value.empty() || value.front() != '^' ? "^" : "";
            params.grammar_trigger_patterns.push_back(head + value + (value.empty() || value.back() != '$' ? "$" : ""));
        } else {
            params.grammar_trigger_patterns.push_back(kind == "word" ? regex_escape(value) : value);
        }
    }
    std::vector<llama_token> prefill = tokens(generation_prompt);
    // Some vocabularies put a space before the first special token, which the template never wrote.
    if (!prefill.empty() && std::isspace(static_cast<unsigned char>(vocab.token_to_bytes(prefill[0], true)[0])) &&
        !std::isspace(static_cast<unsigned char>(generation_prompt[0]))) {
        prefill.erase(prefill.begin());
    }
    params.grammar_prefill = grammar.empty() || grammar_lazy ? std::vector<llama_token>() : prefill;
    params.reasoning_start = thinking_start.empty() ? std::vector<llama_token>() : tokens(thinking_start);
    params.reasoning_ends.clear();
    std::transform(thinking_ends.begin(), thinking_ends.end(), std::back_inserter(params.reasoning_ends), tokens);
    params.reasoning_forced = params.reasoning_ends.empty() ? std::vector<llama_token>() : params.reasoning_ends[0];
    params.reasoning_prefill = params.reasoning_start.empty() ? std::vector<llama_token>() : prefill;
}

}  // namespace kvasir
