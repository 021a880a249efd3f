// Chat templates and replies: every prefix of a reply, broken ones, many threads on one template, thinking budgets.
#include <thread>

#include "core/chat.hpp"
#include "rig.hpp"

using namespace test;
using kvasir::ChatDelta;
using kvasir::ChatParser;
using kvasir::ChatPrompt;
using kvasir::ChatRequest;
using kvasir::ChatTemplate;
using kvasir::Sampler;
using kvasir::SamplerParams;

namespace {

const char *const SOURCE =
    "{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '<tool_call>\\n{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}"
    "{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
const char *const TOOLS =
    "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": "
    "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\"}}}}}]";
const char *const CALL = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}\n</tool_call>";

ChatRequest request(const std::string &tools = TOOLS) {
    ChatRequest r;
    r.messages = "[{\"role\": \"user\", \"content\": \"hi\"}]";
    r.tools = tools;
    return r;
}

ChatTemplate chat_template(const std::string &source = SOURCE) { return ChatTemplate(nullptr, source, "", ""); }

struct Parts {
    std::string reasoning, content, arguments;
    bool operator==(const Parts &o) const {
        return reasoning == o.reasoning && content == o.content && arguments == o.arguments;
    }
};

// Feeds a text n bytes at a time; the sum of the deltas must be what the parser says.
Parts parts_of(const ChatPrompt &prompt, const std::string &text, size_t n) {
    ChatParser parser(prompt, false);
    Parts sum;
    const auto add = [&](const std::vector<ChatDelta> &deltas) {
        for (const ChatDelta &d : deltas) {
            (d.kind == "content" ? sum.content : d.kind == "reasoning" ? sum.reasoning : sum.arguments) += d.text;
        }
    };
    for (size_t at = 0; at < text.size(); at += n) {
        add(parser.feed(text.substr(at, n)));
    }
    add(parser.finish());
    EXPECT(sum.content == parser.content());
    EXPECT(sum.reasoning == parser.reasoning());
    return sum;
}

}  // namespace

TEST(a_reply_has_the_same_parts_however_it_is_cut) {
    const ChatPrompt prompt = chat_template().render(request());
    const std::string think = "<think>\nhm {\n</think>\n\n";
    const std::string broken = "<tool_call>\nnonsense and more of it, much more than a marker is long</tool_call>";
    for (const std::string &text :
         {std::string("plain < { text"), think + "so", think + CALL, std::string(CALL), "a" + std::string(CALL) + "b",
          broken, broken + CALL, std::string("\xf0\x9f\x8c\xa7 x")}) {
        const Parts whole = parts_of(prompt, text, text.size());
        for (const size_t n : {1u, 2u, 3u, 11u}) {
            EXPECT(parts_of(prompt, text, n) == whole);
        }
    }
    EXPECT((parts_of(prompt, think + CALL, 1) == Parts{"hm {", "", "{\"a\": \"b\"}"}));
    EXPECT((parts_of(prompt, broken + CALL, 1) == Parts{"", broken + CALL, ""}));
}

TEST(every_beginning_of_a_reply_can_be_its_end) {
    const ChatPrompt prompt = chat_template().render(request());
    const std::string text = "<think>\nhm\n</think>\n\nso " + std::string(CALL) + " and " + CALL + "</p> {";
    for (size_t n = 0; n <= text.size(); ++n) {
        EXPECT(parts_of(prompt, text.substr(0, n), 1) == parts_of(prompt, text.substr(0, n), 1000));
    }
}

TEST(what_is_not_a_chat_is_refused) {
    REFUSED(BadOption, ChatTemplate(nullptr, "", "", ""));
    REFUSED(BadOption, chat_template("{% for %}"));
    REFUSED(BadOption, chat_template("{{ " + std::string(100000, '(')));
    std::string ifs;
    for (int i = 0; i < 20000; ++i) {
        ifs += "{% if x %}";
    }
    REFUSED(BadOption, chat_template(ifs));
    const ChatTemplate t = chat_template();
    const auto with = [&](auto change) {
        ChatRequest r = request();
        change(r);
        REFUSED(BadOption, t.render(r));
    };
    with([](ChatRequest &r) { r.messages = "["; });
    with([](ChatRequest &r) { r.messages = "{}"; });
    with([](ChatRequest &r) { r.messages = std::string(100000, '['); });
    with([](ChatRequest &r) { r.messages = "[{\"role\": 1, \"content\": \"x\"}]"; });
    with([](ChatRequest &r) { r.messages = "[{\"role\": \"assistant\", \"tool_calls\": [{}]}]"; });
    with([](ChatRequest &r) { r.tools = "[{}]"; });
    with([](ChatRequest &r) { r.tool_choice = "f"; });
    with([](ChatRequest &r) { r.kwargs = {{"x", "{"}}; });
    with([](ChatRequest &r) { r.continue_final = true; });
    ChatRequest r = request();
    r.json_schema = "{\"type\": \"no such type\"}";
    REFUSED(BadSchema, t.render(r));
    REFUSED(BadOption, chat_template("{{ raise_exception('no, not this') }}").render(request("")));
}

TEST(a_deep_nest_of_brackets_is_survived) {
    const ChatPrompt prompt = chat_template().render(request());
    std::string text = "<tool_call>\n{\"name\": \"f\", \"arguments\": ";
    for (int i = 0; i < 50000; ++i) {
        text += "{\"a\": [";
    }
    for (const size_t n : {7u, 4096u, 1u << 20}) {
        ChatParser parser(prompt, false);
        for (size_t at = 0; at < text.size() && !parser.rejected(); at += n) {
            parser.feed(text.substr(at, n));
        }
        EXPECT(parser.rejected());
    }
}

TEST(intervals_in_prose_are_no_nest) {
    const ChatPrompt prompt = chat_template().render(request());
    std::string thought;
    for (int i = 0; i < 300; ++i) {
        thought += "So x is in [0, 1).\n";
    }
    EXPECT(parts_of(prompt, "<think>\n" + thought + "</think>\n\nyes", 500).content == "yes");
}

TEST(a_template_is_shared_by_threads) {
    const ChatTemplate t = chat_template();
    std::vector<std::thread> threads;
    std::vector<Parts> all(4);
    for (Parts &mine : all) {
        threads.emplace_back([&mine, &t] {
            for (int i = 0; i < 5; ++i) {
                mine = parts_of(t.render(request()), CALL, 3);
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (const Parts &one : all) {
        EXPECT((one == Parts{"", "", "{\"a\": \"b\"}"}));
    }
}

TEST(a_prompt_constrains_a_sampler_of_any_vocabulary) {
    const auto model = load();
    const ChatTemplate own(model.get(), "", "", "");
    EXPECT(own.is_explicit());
    EXPECT(!own.render(request("")).prompt.empty());
    for (const char *choice : {"auto", "required", "none"}) {
        ChatRequest r = request();
        r.tool_choice = choice;
        SamplerParams params;
        params.temperature = 0.0f;
        params.reasoning_budget = 3;
        chat_template().render(r).constrain(params, model->vocab());
        Sampler sampler(model->vocab(), params);
        for (int i = 0; i < 20; ++i) {
            sampler.sample(some_logits(model->vocab().n_tokens(), static_cast<uint32_t>(i)).data());
        }
        const auto clone = sampler.clone();
        sampler.reset();
        clone->reset();
    }
}

TEST(the_thinking_ends_when_its_budget_is_spent) {
    const auto model = load();
    SamplerParams p;
    p.temperature = 0.0f;
    p.reasoning_budget = 4;
    p.reasoning_start = {65, 66};
    p.reasoning_ends = {{67}, {68, 69}};
    p.reasoning_forced = {70, 67};
    p.reasoning_prefill = {1, 65, 66};
    p.logit_bias = {{67, -1e9f}, {68, -1e9f}};
    Sampler sampler(model->vocab(), p);
    Tokens made;
    for (int i = 0; i < 8; ++i) {
        auto logits = some_logits(model->vocab().n_tokens(), 3);
        logits[97] = 1000.0f;
        made.push_back(i % 2 ? sampler.sample(logits.data()) : sampler.clone()->sample(logits.data()));
        if (i % 2 == 0) sampler.accept(made.back(), true);
    }
    EXPECT((made == Tokens{97, 97, 97, 97, 70, 67, 97, 97}));
    p.reasoning_ends = {{}};
    p.reasoning_forced = {};
    REFUSED(BadOption, Sampler(model->vocab(), p));
    p.reasoning_ends = {{1 << 30}};
    REFUSED(BadOption, Sampler(model->vocab(), p));
}
