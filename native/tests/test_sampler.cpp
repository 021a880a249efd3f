// Sampler chains: every name, every clone, grammars complete and incomplete, and numbers that are none.
#include <limits>

#include "rig.hpp"

using namespace test;
using kvasir::Sampler;
using kvasir::SamplerParams;

namespace {

const kvasir::Model &shared_model() {
    static const std::unique_ptr<kvasir::Model> model = load();
    return *model;
}

// Makes every sampler of a chain do something.
SamplerParams busy() {
    SamplerParams p;
    p.seed = 5, p.temperature = 0.9f, p.top_n_sigma = 3.0f, p.typical_p = 0.98f, p.min_p = 0.01f;
    p.xtc_probability = 0.5f, p.xtc_threshold = 0.05f, p.repeat_penalty = 1.2f, p.dry_multiplier = 0.7f;
    return p;
}

Tokens run(Sampler &sampler, int n, uint32_t seed = 1) {
    Tokens out;
    const int32_t n_vocab = sampler.vocab().n_tokens();
    for (int i = 0; i < n; ++i) {
        out.push_back(sampler.sample(some_logits(n_vocab, seed + sampler.n_draws()).data()));
    }
    return out;
}

llama_token token_of(char c) { return shared_model().vocab().tokenize(std::string(1, c), false, false).at(0); }

}  // namespace

TEST(every_sampler_runs_alone_and_a_clone_goes_on_the_same) {
    std::vector<SamplerParams> all;
    for (const std::string &name : kvasir::sampler_names()) {
        SamplerParams p = busy();
        p.order = {name};
        all.push_back(p);
    }
    all.push_back(busy());
    all.back().order = {"infill", "temperature"};
    all.push_back(busy());
    all.back().dynatemp_range = 0.5f;
    all.push_back(busy());
    all.back().temperature = 0.0f;
    all.push_back(busy());
    all.back().mirostat = 1;
    all.push_back(busy());
    all.back().mirostat = 2;
    for (const SamplerParams &p : all) {
        Sampler sampler(shared_model().vocab(), p);
        EXPECT(!sampler.names().empty());
        sampler.accept_prompt(some_tokens(100));
        for (int i = 0; i < 12; ++i) {
            const auto clone = sampler.clone();
            EXPECT(clone->n_draws() == sampler.n_draws() && clone->names() == sampler.names());
            const Tokens made = run(*clone, 5);
            EXPECT(run(*clone->clone(), 1).size() == 1);
            EXPECT(run(*sampler.clone(), 5) == made);
            run(sampler, 1);
        }
        sampler.reset();
        EXPECT(sampler.n_draws() == 0);
        const Tokens first = run(sampler, 8);
        sampler.reset();
        EXPECT(run(sampler, 8) == first);
    }
    SamplerParams p = busy();
    p.adaptive_target = 0.3f;  // its clone starts its own stream; it must only never read astray
    Sampler sampler(shared_model().vocab(), p);
    for (int i = 0; i < 20; ++i) {
        run(*sampler.clone(), 3);
        sampler.accept(token_of('a'), false);
        run(sampler, 1);
    }
}

TEST(draws_depend_on_seed_and_index_alone) {
    SamplerParams p;
    p.seed = ~0ull;
    Sampler a(shared_model().vocab(), p), b(shared_model().vocab(), p);
    const Tokens made = run(a, 20);
    b.seek(10);
    EXPECT(run(b, 10) == Tokens(made.begin() + 10, made.end()));
    p.seed = 1;
    Sampler other(shared_model().vocab(), p);
    EXPECT(run(other, 20) != made);
}

TEST(numbers_that_are_none_are_refused) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    float SamplerParams::*const fields[] = {
        &SamplerParams::temperature,      &SamplerParams::top_p,          &SamplerParams::min_p,
        &SamplerParams::typical_p,        &SamplerParams::top_n_sigma,    &SamplerParams::repeat_penalty,
        &SamplerParams::presence_penalty, &SamplerParams::dry_multiplier, &SamplerParams::mirostat_tau,
        &SamplerParams::dynatemp_range,   &SamplerParams::xtc_threshold,  &SamplerParams::adaptive_target};
    for (const auto field : fields) {
        for (const float value : {nan, inf, -inf}) {
            SamplerParams p;
            p.*field = value;
            REFUSED(BadOption, Sampler(shared_model().vocab(), p));
        }
    }
    using Edit = void (*)(SamplerParams &);
    const Edit edits[] = {
        [](auto &p) { p.order = {"magic"}; },
        [](auto &p) { p.min_keep = 0; },
        [](auto &p) { p.repeat_penalty = 0.0f; },
        [](auto &p) { p.penalty_last_n = -1; },
        [](auto &p) { p.penalty_last_n = INT32_MAX; },
        [](auto &p) { p.dry_penalty_last_n = INT32_MAX; },
        [](auto &p) { p.dry_allowed_length = -1; },
        [](auto &p) { p.mirostat = 3; },
        [](auto &p) { p.logit_bias = {{-1, 1.0f}}; },
        [](auto &p) { p.logit_bias = {{97, NAN}}; },
        [](auto &p) { p.logit_bias = {{97, INFINITY}}; },
        [](auto &p) { p.logit_bias = {{1 << 30, 1.0f}}; },
    };
    for (const Edit edit : edits) {
        SamplerParams p;
        edit(p);
        REFUSED(BadOption, Sampler(shared_model().vocab(), p));
    }
}

TEST(logits_that_are_none_are_an_error_not_a_crash) {
    const auto n = static_cast<size_t>(shared_model().vocab().n_tokens());
    constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    std::vector<SamplerParams> all = {SamplerParams(), busy(), busy(), busy(), busy()};
    all[2].temperature = 0.0f;
    all[3].mirostat = 1;
    all[4].mirostat = 2;
    for (const SamplerParams &p : all) {
        Sampler sampler(shared_model().vocab(), p);
        for (const float value : {nan, inf, -inf, 0.0f, 3e38f, -3e38f}) {
            for (const size_t every : {1, 2, 7}) {
                std::vector<float> logits = some_logits(static_cast<int32_t>(n), 2);
                for (size_t i = 0; i < n; i += every) {
                    logits[i] = value;
                }
                try {
                    const llama_token token = sampler.sample(logits.data());
                    EXPECT(token >= 0 && static_cast<size_t>(token) < n);
                    EXPECT(value == value);
                } catch (const kvasir::Error &) {
                }
            }
        }
    }
}

TEST(odd_settings_of_dry_and_bias_are_harmless) {
    SamplerParams p = busy();
    p.dry_sequence_breakers = {"", std::string(1, '\0'), "\xff\xfe", std::string(5000, 'x')};
    p.dry_allowed_length = 0;
    p.logit_bias = {{97, -INFINITY}, {98, -100.0f}, {97, 5.0f}};
    p.ignore_eos = true;
    p.top_k = INT32_MAX, p.min_keep = INT32_MAX;
    Sampler sampler(shared_model().vocab(), p);
    for (const llama_token token : run(sampler, 200)) {
        EXPECT(token != 97 && !shared_model().vocab().is_eog(token));
    }
    p = SamplerParams();
    for (llama_token token = 0; token < shared_model().vocab().n_tokens(); ++token) {
        p.logit_bias.emplace_back(token, -INFINITY);
    }
    Sampler nothing(shared_model().vocab(), p);
    REFUSED(BadOption, run(nothing, 1));
    Sampler small(shared_model().vocab(), SamplerParams());
    REFUSED(BadOption, small.accept(-1, true));
    REFUSED(BadOption, small.accept(1 << 30, false));
    SamplerParams history;
    history.repeat_penalty = 1.5f;
    Sampler penal(shared_model().vocab(), history);
    REFUSED(BadOption, penal.accept_prompt({1 << 30}));
}

TEST(a_grammar_admits_its_texts_and_ends_only_when_complete) {
    SamplerParams p = busy();
    p.grammar = R"(root ::= "yes" | "no" " " [a-c]+ "!")";
    const kvasir::Vocab vocab = shared_model().vocab();
    for (uint64_t seed = 0; seed < 40; ++seed) {
        p.seed = seed;
        Sampler sampler(vocab, p);
        std::string text;
        llama_token token = -1;
        for (int i = 0; i < 200 && (token < 0 || !vocab.is_eog(token)); ++i) {
            const auto clone = sampler.clone();
            const auto logits = some_logits(vocab.n_tokens(), static_cast<uint32_t>(seed * 1000) + sampler.n_draws());
            token = sampler.sample(logits.data());
            EXPECT(clone->sample(logits.data()) == token);
            text += vocab.token_to_bytes(token, false);
        }
        EXPECT(vocab.is_eog(token) && (text == "yes" || (text.find("no ") == 0 && text.back() == '!')));
    }
    Sampler sampler(vocab, p);
    REFUSED(BadGrammar, sampler.accept(vocab.eog_tokens().at(0), true));  // llama.cpp would abort the process
    REFUSED(BadGrammar, sampler.accept(token_of('x'), true));
    for (const char c : {'y', 'e', 's'}) {
        sampler.accept(token_of(c), true);
    }
    sampler.accept(vocab.eog_tokens().at(0), true);
    sampler.reset();
    sampler.accept(token_of('n'), true);
    EXPECT(sampler.n_draws() == 1);
}

TEST(a_grammar_nothing_can_spell_is_an_error) {
    SamplerParams p;
    p.grammar = "root ::= \"ab\"";
    for (const llama_token token : shared_model().vocab().eog_tokens()) {
        p.logit_bias.emplace_back(token, -INFINITY);
    }
    Sampler sampler(shared_model().vocab(), p);
    std::vector<float> logits = some_logits(shared_model().vocab().n_tokens(), 1);
    logits[static_cast<size_t>(token_of('a'))] = -INFINITY;
    try {
        sampler.sample(logits.data());
        EXPECT(false);
    } catch (const kvasir::Error &) {
    }
}

TEST(broken_grammars_are_refused) {
    std::string chain, nested(100000, '(');
    for (int i = 0; i < 50000; ++i) {
        chain += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + "\n";
    }
    const std::string bad[] = {"root",

                               "root ::= (",
                               "root ::= \"",
                               "root ::= [a",
                               "root ::= x",
                               "root ::= root \"a\"",
                               "other ::= \"a\"",
                               "root ::= \"a\"{5,2}",
                               "\xff\xff",
                               "root ::= \"a\"{99999999999999999999}",
                               "root ::= a\na ::= b\nb ::= a",
                               "root ::= " + nested,
                               "root ::= r0\n" + chain + "r50000 ::= \"a\"",
                               "root ::= [\\x",
                               "root ::= \"\\u12\"",
                               "root ::= !"};
    for (const std::string &grammar : bad) {
        SamplerParams p;
        p.grammar = grammar;
        REFUSED(BadGrammar, Sampler(shared_model().vocab(), p));
    }
    SamplerParams p;
    p.grammar = "root ::= r0\n";
    for (int i = 0; i < 9990; ++i) {
        p.grammar += "r" + std::to_string(i) + " ::= r" + std::to_string(i + 1) + "\n";
    }
    p.grammar += "r9990 ::= \"a\"\n";
    Sampler deep(shared_model().vocab(), p);
    deep.accept(token_of('a'), true);
    p.grammar = "root ::= " + std::string(200, '(') + "\"a\"" + std::string(200, ')') + " # ((((";
    Sampler nest(shared_model().vocab(), p);
    nest.accept(token_of('a'), true);
    std::mt19937 random(9);
    const std::string seed = R"(root ::= ("a" | [b-d]{1,3} | x?)* . x ::= "\n" # c)";
    for (int i = 0; i < 600; ++i) {
        p.grammar = seed;
        for (int edits = 0; edits < 3; ++edits) {
            p.grammar[random() % p.grammar.size()] = "()[]{}\"\\|*+?:=#!x1,\n\xff"[random() % 22];
        }
        try {
            Sampler(shared_model().vocab(), p).clone();
        } catch (const kvasir::Error &e) {
            EXPECT(e.kind == kvasir::Kind::BadGrammar);
        }
    }
}

TEST(a_lazy_grammar_waits_for_its_trigger) {
    SamplerParams p;
    p.grammar = "root ::= \"<a>\" [0-9]";
    p.grammar_lazy = true;
    p.grammar_trigger_patterns = {"[\\s\\S]*?(<a>)[\\s\\S]*"};
    const kvasir::Vocab vocab = shared_model().vocab();
    Sampler sampler(vocab, p);
    for (const char c : std::string("hi <")) {
        sampler.accept(token_of(c), true);
    }
    sampler.clone()->accept(vocab.eog_tokens().at(0), true);  // still asleep: anything goes
    sampler.accept(token_of('a'), true);
    sampler.accept(token_of('>'), true);
    REFUSED(BadGrammar, sampler.clone()->accept(token_of('x'), true));
    REFUSED(BadGrammar, sampler.clone()->accept(vocab.eog_tokens().at(0), true));
    sampler.accept(token_of('7'), true);
    sampler.accept(vocab.eog_tokens().at(0), true);
    sampler.reset();
    sampler.accept(token_of('x'), true);

    p.grammar_trigger_patterns = {"[\\s\\S]*?(zz)[\\s\\S]*"};  // wakes on a text the grammar does not admit
    Sampler misfit(vocab, p);
    misfit.accept(token_of('z'), true);
    REFUSED(BadGrammar, misfit.accept(token_of('z'), true));
    p.grammar_trigger_patterns = {"("};
    REFUSED(BadGrammar, Sampler(vocab, p));
    p.grammar_trigger_patterns = {};
    p.grammar_trigger_tokens = {1 << 30};
    REFUSED(BadOption, Sampler(vocab, p));
    p.grammar_trigger_tokens = {vocab.eog_tokens().at(0)};  // an end token as trigger
    Sampler odd(vocab, p);
    try {
        odd.accept(vocab.eog_tokens().at(0), true);
    } catch (const kvasir::Error &e) {
        EXPECT(e.kind == kvasir::Kind::BadGrammar);
    }
    p.grammar_trigger_tokens = {};
    Sampler never(vocab, p);
    EXPECT(run(never, 5).size() == 5);
}

// Bias and penalties at the head of a chain take a short way; behind a sampler that keeps everything, the long one.
TEST(the_short_way_samples_what_the_long_way_does) {
    const std::vector<std::string> tail = {"penalties", "top_k", "top_p", "min_p", "temperature"};
    for (const float temperature : {0.0f, 0.8f}) {
        for (const int32_t top_k : {1, 40, 300}) {
            SamplerParams shorter;
            shorter.seed = 9, shorter.temperature = temperature, shorter.top_k = top_k;
            shorter.repeat_penalty = 1.3f, shorter.frequency_penalty = 0.4f, shorter.presence_penalty = 0.2f;
            shorter.penalty_last_n = 24;
            shorter.order = tail;
            SamplerParams longer = shorter;
            longer.top_n_sigma = 1e6f;
            longer.order = {"top_n_sigma"};
            longer.order.insert(longer.order.end(), tail.begin(), tail.end());
            if (temperature == 0.0f) longer.order = {"dry", "penalties", "temperature"}, longer.dry_multiplier = 1e-9f;
            Sampler one(shared_model().vocab(), shorter), other(shared_model().vocab(), longer);
            one.accept_prompt(some_tokens(40));
            other.accept_prompt(some_tokens(40));
            EXPECT(run(one, 80) == run(other, 80));
        }
    }
}

TEST(a_bias_is_the_same_as_other_logits) {
    const int32_t n_vocab = shared_model().vocab().n_tokens();
    for (const float temperature : {0.0f, 0.8f}) {
        SamplerParams plain;
        plain.seed = 3, plain.temperature = temperature;
        SamplerParams biased = plain;
        biased.logit_bias = {{5, 8.0f}, {7, -std::numeric_limits<float>::infinity()}, {n_vocab - 1, 2.5f}};
        Sampler one(shared_model().vocab(), plain), other(shared_model().vocab(), biased);
        for (uint32_t i = 0; i < 60; ++i) {
            std::vector<float> logits = some_logits(n_vocab, i);
            const llama_token by_bias = other.sample(logits.data());
            for (const auto &[token, value] : biased.logit_bias) {
                logits[static_cast<size_t>(token)] += value;
            }
            EXPECT(one.sample(logits.data()) == by_bias);
        }
    }
}
