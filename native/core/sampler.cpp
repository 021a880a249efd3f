#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <regex>

#include "budget.hpp"
#include "draw.hpp"
#include "error.hpp"
#include "nesting.hpp"
#include "runtime.hpp"

namespace kvasir {

namespace {

constexpr int32_t BLOCK = 256;

// The largest of a block. Sixteen at a time and without a branch, so that the compiler makes vectors of it.
float largest(const float *logits, int32_t n) {
    constexpr int32_t width = 16;
    float most[width];
    std::fill(most, most + width, -std::numeric_limits<float>::infinity());
    int32_t i = 0;
    for (; i + width <= n; i += width) {
        for (int32_t k = 0; k < width; ++k) {
            most[k] = logits[i + k] > most[k] ? logits[i + k] : most[k];
        }
    }
    for (; i < n; ++i) {
        most[0] = std::max(most[0], logits[i]);
    }
    return *std::max_element(most, most + width);
}

llama_token argmax(const float *logits, int32_t n_vocab) {
    int32_t block = 0;
    float most = -std::numeric_limits<float>::infinity();
    for (int32_t at = 0; at < n_vocab; at += BLOCK) {
        const float here = largest(logits + at, std::min(BLOCK, n_vocab - at));
        if (here > most) {
            most = here;
            block = at;
        }
    }
    return static_cast<llama_token>(std::max_element(logits + block, logits + std::min(block + BLOCK, n_vocab)) -
                                    logits);
}

}  // namespace

// Reused from token to token: a full vocabulary is 12 bytes a token.
struct Candidates {
    std::vector<llama_token_data> data;
    llama_token_data_array array{};
    std::vector<float> edited;  // the logits after bias and penalties, where there are any

    void all(const float *logits, int32_t n_vocab) {
        data.resize(static_cast<size_t>(n_vocab));
        for (int32_t i = 0; i < n_vocab; ++i) {
            data[static_cast<size_t>(i)] = {i, logits[i], 0.0f};
        }
        array = {data.data(), data.size(), -1, false};
    }

    // The k largest, sorted: one pass with a small heap instead of a table of the whole vocabulary.
    void top(const float *logits, int32_t n_vocab, int32_t k) {
        const auto smaller = [](const llama_token_data &a, const llama_token_data &b) { return a.logit > b.logit; };
        const auto n = static_cast<size_t>(std::min(k, n_vocab));
        data.clear();
        data.reserve(n);
        for (int32_t i = 0; i < static_cast<int32_t>(n); ++i) {
            data.push_back({i, logits[i], 0.0f});
        }
        std::make_heap(data.begin(), data.end(), smaller);
        float least = data.front().logit;
        for (auto at = static_cast<int32_t>(n); at < n_vocab; at += BLOCK) {
            const int32_t end = std::min(at + BLOCK, n_vocab);
            if (largest(logits + at, end - at) <= least) continue;  // nearly every block
            for (int32_t i = at; i < end; ++i) {
                if (logits[i] > least) {
                    std::pop_heap(data.begin(), data.end(), smaller);
                    data.back() = {i, logits[i], 0.0f};
                    std::push_heap(data.begin(), data.end(), smaller);
                    least = data.front().logit;
                }
            }
        }
        std::sort_heap(data.begin(), data.end(), smaller);
        array = {data.data(), data.size(), -1, true};
    }
};

namespace {

constexpr int32_t FAST_TOP_K = 1024;  // above this a heap loses to a partial sort

constexpr int32_t MAX_PENALTY_WINDOW = 1 << 20;  // 4 MB a sampler, above every context in use

// Without a branch in the loop, so that it is a few microseconds for a large vocabulary.
bool any_nan(const float *logits, int32_t n_vocab) {
    int found = 0;
    for (int32_t i = 0; i < n_vocab; ++i) {
        found |= logits[i] != logits[i];
    }
    return found != 0;
}

[[noreturn]] void bad(const std::string &message) { throw Error(Kind::BadOption, message); }

constexpr size_t MAX_RULES = 10000;  // llama.cpp follows chains of rules recursively

[[noreturn]] void bad_grammar(const std::string &why) { throw Error(Kind::BadGrammar, "the grammar " + why); }

// What llama.cpp's parser does not survive: deep nesting, long chains, and "{5,2}", which it counts down past zero.
void check_grammar(const std::string &grammar) {
    if (grammar.find('\0') != std::string::npos) bad_grammar("holds a NUL byte.");
    const std::string text = bare(grammar, true);
    if (deepest_nesting(text, "(", ")") > MAX_NESTING) {
        bad_grammar("nests more than " + std::to_string(MAX_NESTING) +
                    " parentheses; give the inner ones a rule of their own.");
    }
    size_t n_rules = 0;
    for (size_t at = text.find("::="); at != std::string::npos; at = text.find("::=", at + 3)) {
        ++n_rules;
    }
    if (n_rules > MAX_RULES) {
        bad_grammar("has " + std::to_string(n_rules) + " rules; at most " + std::to_string(MAX_RULES) + " are read.");
    }
    for (size_t at = text.find('{'); at != std::string::npos; at = text.find('{', at + 1)) {
        unsigned long long least = 0, most = 0;
        if (std::sscanf(text.c_str() + at, "{ %llu , %llu", &least, &most) == 2 && most < least) {
            bad_grammar("repeats something at least " + std::to_string(least) + " and at most " + std::to_string(most) +
                        " times.");
        }
    }
}

// A lazy grammar wakes up on a text that it may not admit, and says so with a plain exception.
void accept_by_grammar(llama_sampler *grammar, llama_token token) {
    try {
        llama_sampler_accept(grammar, token);
    } catch (const std::exception &e) {
        throw Error(Kind::BadGrammar, std::string("the grammar does not admit what was generated: ") + e.what() + ".");
    }
}

}  // namespace

const std::vector<std::string> &sampler_names() {
    static const std::vector<std::string> names = {"penalties",  "dry",      "top_n_sigma", "top_k",       "typical_p",
                                                   "top_p",      "min_p",    "xtc",         "temperature", "infill",
                                                   "logit_bias", "mirostat", "mirostat_v2", "adaptive_p"};
    return names;
}

Sampler::Sampler(const Vocab &vocab, const SamplerParams &params)
    : vocab_(vocab), params_(params), candidates_(std::make_unique<Candidates>()) {
    with_abort_trap(Kind::BadOption, "building the sampler chain", [&] { build(); });
}

Sampler::~Sampler() = default;

void Sampler::build() {
    check_numbers();
    greedy_ = params_.temperature <= 0.0f && params_.mirostat == 0 && params_.adaptive_target < 0.0f;
    biases_ = biases();
    if (!biases_.empty()) {
        add("logit_bias",
            llama_sampler_init_logit_bias(vocab_.n_tokens(), static_cast<int32_t>(biases_.size()), biases_.data()));
    }
    for (const std::string &name : params_.order) {
        add_by_name(name);
    }
    add_last();
    n_edits_ = biases_.empty() ? 0 : 1;
    if (n_edits_ < chain_.size() && chain_[n_edits_].name == "penalties") ++n_edits_;
    if (!params_.grammar.empty()) {
        build_grammar();
        prefill_grammar();
    }
    if (params_.reasoning_budget < -1) bad("reasoning_budget is a number of tokens, or -1 for no limit.");
    if (ReasoningBudget::wanted(params_)) budget_ = std::make_unique<ReasoningBudget>(vocab_, params_);
}

// A NaN on its way into a sort reads outside its array, and a window is allocated whole.
void Sampler::check_numbers() const {
    const SamplerParams &p = params_;
    const std::pair<const char *, float> numbers[] = {
        {"temperature", p.temperature},
        {"dynatemp_range", p.dynatemp_range},
        {"dynatemp_exponent", p.dynatemp_exponent},
        {"top_p", p.top_p},
        {"min_p", p.min_p},
        {"typical_p", p.typical_p},
        {"top_n_sigma", p.top_n_sigma},
        {"xtc_probability", p.xtc_probability},
        {"xtc_threshold", p.xtc_threshold},
        {"repeat_penalty", p.repeat_penalty},
        {"frequency_penalty", p.frequency_penalty},
        {"presence_penalty", p.presence_penalty},
        {"dry_multiplier", p.dry_multiplier},
        {"dry_base", p.dry_base},
        {"mirostat_tau", p.mirostat_tau},
        {"mirostat_eta", p.mirostat_eta},
        {"adaptive_target", p.adaptive_target},
        {"adaptive_decay", p.adaptive_decay},
    };
    for (const auto &[name, value] : numbers) {
        if (!std::isfinite(value)) bad(std::string(name) + " must be a finite number.");
    }
    if (p.repeat_penalty <= 0.0f) bad("repeat_penalty must be above 0 (1.0 turns it off).");
    if (p.min_keep < 1) bad("min_keep must be at least 1.");
    if (p.dry_allowed_length < 0) bad("dry_allowed_length counts tokens and cannot be negative.");
    for (const int32_t n : {p.penalty_last_n, p.dry_penalty_last_n}) {
        if (n < 0) bad("penalty_last_n counts tokens and cannot be negative here.");
        if (n > MAX_PENALTY_WINDOW)
            bad("penalty_last_n is " + std::to_string(n) + "; at most " + std::to_string(MAX_PENALTY_WINDOW) +
                " tokens are remembered.");
    }
}

// What the user wants, and the tokens that must never come.
std::vector<llama_logit_bias> Sampler::biases() const {
    constexpr float never = -std::numeric_limits<float>::infinity();
    std::vector<llama_logit_bias> out;
    for (const auto &[token, value] : params_.logit_bias) {
        vocab_.check(token);
        if (std::isnan(value) || value > std::numeric_limits<float>::max())
            bad("a logit_bias is a number, or -inf to forbid its token.");
        out.push_back({token, value});
    }
    if (params_.ignore_eos) {
        for (const llama_token token : vocab_.eog_tokens()) {
            out.push_back({token, never});
        }
    }
    int32_t n_suppressed = 0;
    const llama_token *suppressed = llama_vocab_get_suppress_tokens(vocab_.raw(), &n_suppressed);
    for (int32_t i = 0; i < n_suppressed; ++i) {
        out.push_back({suppressed[i], never});
    }
    return out;
}

void Sampler::add(const std::string &name, llama_sampler *sampler) { chain_.push_back({name, SamplerPtr(sampler)}); }

// Leaves out what its settings make a no-op: a shorter chain is a faster one, and `names` tells the truth.
void Sampler::add_by_name(const std::string &name) {
    const auto &known = sampler_names();
    if (std::find(known.begin(), known.end(), name) == known.end()) {
        bad("there is no sampler '" + name + "'.");
    }
    const SamplerParams &p = params_;
    const auto keep = static_cast<size_t>(p.min_keep);
    if (name == "penalties") {
        if (p.penalty_last_n > 0 &&
            (p.repeat_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f)) {
            add(name, llama_sampler_init_penalties(vocab_.n_tokens(), p.penalty_last_n, p.repeat_penalty,
                                                   p.frequency_penalty, p.presence_penalty));
        }
    } else if (name == "dry") {
        if (p.dry_multiplier > 0.0f && p.dry_base >= 1.0f && p.dry_penalty_last_n > 0) {
            std::vector<const char *> breakers;
            for (const std::string &b : p.dry_sequence_breakers) {
                breakers.push_back(b.c_str());
            }
            add(name, llama_sampler_init_dry(vocab_.raw(), p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                             p.dry_penalty_last_n, breakers.data(), breakers.size()));
        }
    } else if (greedy_ || p.mirostat != 0) {
        // The largest logit wins, or mirostat truncates by itself: nothing below changes the outcome.
    } else if (name == "top_n_sigma") {
        if (p.top_n_sigma > 0.0f) add(name, llama_sampler_init_top_n_sigma(p.top_n_sigma));
    } else if (name == "top_k") {
        if (p.top_k > 0) add(name, llama_sampler_init_top_k(p.top_k));
    } else if (name == "typical_p") {
        if (p.typical_p < 1.0f) add(name, llama_sampler_init_typical(p.typical_p, keep));
    } else if (name == "top_p") {
        if (p.top_p < 1.0f) add(name, llama_sampler_init_top_p(p.top_p, keep));
    } else if (name == "min_p") {
        if (p.min_p > 0.0f) add(name, llama_sampler_init_min_p(p.min_p, keep));
    } else if (name == "xtc") {
        if (p.xtc_probability > 0.0f && p.xtc_threshold <= 0.5f) add(name, nullptr);
    } else if (name == "temperature") {
        if (p.dynatemp_range > 0.0f) {
            add(name, llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent));
        } else if (p.temperature != 1.0f) {
            add(name, llama_sampler_init_temp(p.temperature));
        }
    } else if (name == "infill") {
        add(name, llama_sampler_init_infill(vocab_.raw()));
    }
}

void Sampler::add_last() {
    const auto seed = static_cast<uint32_t>(params_.seed ^ (params_.seed >> 32));
    if (params_.mirostat == 1) {
        add("temperature", llama_sampler_init_temp(params_.temperature));
        add("mirostat",
            llama_sampler_init_mirostat(vocab_.n_tokens(), seed, params_.mirostat_tau, params_.mirostat_eta, 100));
    } else if (params_.mirostat == 2) {
        add("temperature", llama_sampler_init_temp(params_.temperature));
        add("mirostat_v2", llama_sampler_init_mirostat_v2(seed, params_.mirostat_tau, params_.mirostat_eta));
    } else if (params_.mirostat != 0) {
        bad("mirostat is 0 (off), 1 or 2, not " + std::to_string(params_.mirostat) + ".");
    } else if (params_.adaptive_target >= 0.0f) {
        add("adaptive_p", llama_sampler_init_adaptive_p(params_.adaptive_target, params_.adaptive_decay, seed));
    } else {
        return;
    }
    selects_itself_ = true;
}

void Sampler::build_grammar() {
    check_grammar(params_.grammar);
    LogCapture log;
    llama_sampler *grammar = nullptr;
    try {
        if (params_.grammar_lazy) {
            std::vector<const char *> patterns;
            for (const std::string &p : params_.grammar_trigger_patterns) {
                const std::regex valid(p);  // llama.cpp leaks where this throws
                patterns.push_back(p.c_str());
            }
            for (const llama_token token : params_.grammar_trigger_tokens) {
                vocab_.check(token);
            }
            grammar = llama_sampler_init_grammar_lazy_patterns(
                vocab_.raw(), params_.grammar.c_str(), params_.grammar_root.c_str(), patterns.data(), patterns.size(),
                params_.grammar_trigger_tokens.data(), params_.grammar_trigger_tokens.size());
        } else {
            grammar = llama_sampler_init_grammar(vocab_.raw(), params_.grammar.c_str(), params_.grammar_root.c_str());
        }
    } catch (const Error &) {
        throw;
    } catch (const std::exception &e) {
        throw Error(Kind::BadGrammar, std::string("the grammar is not valid GBNF: ") + e.what() + ".");
    }
    if (!grammar) {
        throw Error(Kind::BadGrammar,
                    "the grammar is not valid GBNF: " +
                        log.reason("it could not be parsed, or has no rule '" + params_.grammar_root + "'") + ".");
    }
    grammar_.reset(grammar);
}

// A template's grammar begins with what the prompt has written already, such as an opened block of thinking.
void Sampler::prefill_grammar() {
    if (params_.grammar_lazy) return;
    for (const llama_token token : params_.grammar_prefill) {
        vocab_.check(token);
        if (!grammar_allows(token)) {
            throw Error(Kind::BadGrammar, "the grammar does not admit the prefill's token " + std::to_string(token) +
                                              "; give it what the grammar's text begins with.");
        }
        accept_by_grammar(grammar_.get(), token);
    }
}

llama_token Sampler::sample(const float *logits) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (any_nan(logits, vocab_.n_tokens())) bad("the model produced no finite logits for this row.");
    llama_token token = LLAMA_TOKEN_NULL;
    with_abort_trap(Kind::BadOption, "sampling", [&] {
        const llama_token forced = budget_ ? budget_->forced() : LLAMA_TOKEN_NULL;
        token = forced != LLAMA_TOKEN_NULL ? forced : pick(logits, false);
        if (grammar_applies() && !grammar_allows(token)) {
            attempt_ = 1;
            token = pick(logits, true);
        }
        accept_locked(token, true);
    });
    return token;
}

llama_token Sampler::pick(const float *logits, bool with_grammar) {
    const int32_t n_vocab = vocab_.n_tokens();
    size_t next = with_grammar ? 0 : n_edits_;
    if (next) logits = edit(logits);
    if (greedy_ && next == chain_.size() && !with_grammar) {
        return argmax(logits, n_vocab);
    }
    Candidates &c = *candidates_;
    const bool top_k_next =
        !with_grammar && next < chain_.size() && chain_[next].name == "top_k" && params_.top_k <= FAST_TOP_K;
    if (top_k_next) {
        c.top(logits, n_vocab, std::max(params_.top_k, params_.min_keep));
        ++next;
    } else {
        c.all(logits, n_vocab);
    }
    if (with_grammar) {
        llama_sampler_apply(grammar_.get(), &c.array);
        const bool any = std::any_of(c.data.begin(), c.data.end(), [](const llama_token_data &d) {
            return d.logit > -std::numeric_limits<float>::infinity();
        });
        if (!any) {
            throw Error(
                Kind::BadGrammar,
                "the grammar admits no token of this vocabulary here; check that its rules can be spelled in it.");
        }
    }
    apply_chain(c, next);
    return select(c.array);
}

// Bias and penalties change a few tokens that are known beforehand: only those pass through llama.cpp's samplers.
const float *Sampler::edit(const float *logits) {
    Candidates &c = *candidates_;
    c.edited.assign(logits, logits + vocab_.n_tokens());
    for (const llama_logit_bias &bias : biases_) {
        c.edited[static_cast<size_t>(bias.token)] += bias.bias;
    }
    if (chain_[n_edits_ - 1].name == "penalties") {
        std::vector<llama_token> seen(recent_.begin(), recent_.end());
        std::sort(seen.begin(), seen.end());
        seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
        c.data.clear();
        for (const llama_token token : seen) {
            c.data.push_back({token, c.edited[static_cast<size_t>(token)], 0.0f});
        }
        c.array = {c.data.data(), c.data.size(), -1, false};
        llama_sampler_apply(chain_[n_edits_ - 1].sampler.get(), &c.array);
        for (const llama_token_data &token : c.data) {
            c.edited[static_cast<size_t>(token.id)] = token.logit;
        }
    }
    return c.edited.data();
}

void Sampler::apply_chain(Candidates &candidates, size_t first_link) const {
    for (size_t i = first_link; i < chain_.size(); ++i) {
        if (chain_[i].sampler) {
            llama_sampler_apply(chain_[i].sampler.get(), &candidates.array);
        } else {
            apply_xtc(candidates.array);
        }
    }
}

// Exclude top choices: by chance, drops every candidate above the threshold but the least likely of them.
void Sampler::apply_xtc(llama_token_data_array &array) const {
    if (array.size < 2 || draw(params_.seed, index_, attempt_, Purpose::Xtc) > params_.xtc_probability) {
        return;
    }
    if (!array.sorted) {
        std::sort(array.data, array.data + array.size,
                  [](const llama_token_data &a, const llama_token_data &b) { return a.logit > b.logit; });
        array.sorted = true;
    }
    double sum = 0.0;
    for (size_t i = 0; i < array.size; ++i) {
        array.data[i].p = std::exp(array.data[i].logit - array.data[0].logit);
        sum += static_cast<double>(array.data[i].p);
    }
    size_t n_above = 0;
    while (n_above < array.size &&
           static_cast<double>(array.data[n_above].p) / sum >= static_cast<double>(params_.xtc_threshold)) {
        ++n_above;
    }
    if (n_above >= 2 && array.size - (n_above - 1) >= static_cast<size_t>(params_.min_keep)) {
        array.data += n_above - 1;
        array.size -= n_above - 1;
    }
}

llama_token Sampler::select(llama_token_data_array &array) const {
    if (selects_itself_) {
        if (array.selected < 0) throw Error(Kind::BadOption, "the sampler chain selected no token.");
        return array.data[array.selected].id;
    }
    if (array.size == 0) throw Error(Kind::BadOption, "the sampler chain left no candidate; raise min_keep.");
    const auto less = [](const llama_token_data &a, const llama_token_data &b) { return a.logit < b.logit; };
    const llama_token_data *best =
        array.sorted ? array.data : std::max_element(array.data, array.data + array.size, less);
    if (!std::isfinite(best->logit)) throw Error(Kind::BadOption, "the model produced no finite logits for this row.");
    if (greedy_) return best->id;

    double sum = 0.0;
    for (size_t i = 0; i < array.size; ++i) {
        array.data[i].p = std::exp(array.data[i].logit - best->logit);
        sum += static_cast<double>(array.data[i].p);
    }
    double left = draw(params_.seed, index_, attempt_, Purpose::Token) * sum;
    for (size_t i = 0; i < array.size; ++i) {
        left -= static_cast<double>(array.data[i].p);
        if (left < 0.0) return array.data[i].id;
    }
    return best->id;  // rounding ate the rest of the last interval
}

// What a model thinks is no call: a lazy grammar neither wakes up nor looks on.
bool Sampler::grammar_applies() const { return grammar_ && !(budget_ && params_.grammar_lazy && budget_->thinking()); }

bool Sampler::grammar_allows(llama_token token) const {
    llama_token_data one = {token, 1.0f, 0.0f};
    llama_token_data_array array = {&one, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &array);
    return std::isfinite(one.logit);
}

void Sampler::accept(llama_token token, bool generated) {
    vocab_.check(token);
    std::lock_guard<std::mutex> lock(mutex_);
    // The grammar aborts the process on an end token it does not expect, so it is asked first.
    if (generated && grammar_applies() && !grammar_allows(token)) {
        throw Error(Kind::BadGrammar, "the grammar does not admit token " + std::to_string(token) + " here.");
    }
    with_abort_trap(Kind::BadGrammar, "accepting a token", [&] { accept_locked(token, generated); });
}

void Sampler::accept_locked(llama_token token, bool generated) {
    for (const Link &link : chain_) {
        if (link.sampler) llama_sampler_accept(link.sampler.get(), token);
    }
    recent_.push_back(token);
    if (recent_.size() > static_cast<size_t>(params_.penalty_last_n)) recent_.pop_front();
    if (!generated) return;
    const bool applies = grammar_applies();
    if (applies) accept_by_grammar(grammar_.get(), token);
    if (budget_) {
        budget_->accept(token);
        // The marker that ends the thinking may be the one that begins a call.
        for (const llama_token end : grammar_ && !applies ? budget_->ended_by() : std::vector<llama_token>()) {
            accept_by_grammar(grammar_.get(), end);
        }
    }
    ++index_;
    attempt_ = 0;
}

bool Sampler::needs_history() const {
    return std::any_of(chain_.begin(), chain_.end(),
                       [](const Link &link) { return link.name == "penalties" || link.name == "dry"; });
}

void Sampler::accept_prompt(const std::vector<llama_token> &tokens) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!needs_history()) return;
    const auto window = static_cast<size_t>(std::max(params_.penalty_last_n, params_.dry_penalty_last_n));
    for (size_t i = tokens.size() > window ? tokens.size() - window : 0; i < tokens.size(); ++i) {
        vocab_.check(tokens[i]);
        accept_locked(tokens[i], false);
    }
}

void Sampler::reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Link &link : chain_) {
        if (link.sampler) llama_sampler_reset(link.sampler.get());
    }
    if (grammar_) {
        llama_sampler_reset(grammar_.get());
        prefill_grammar();
    }
    if (budget_) budget_->reset();
    recent_.clear();
    index_ = attempt_ = 0;
}

std::unique_ptr<Sampler> Sampler::clone() const {
    std::lock_guard<std::mutex> lock(mutex_);
    SamplerParams bare = params_;
    bare.grammar.clear();  // cloned below: building it again would walk the vocabulary
    bare.reasoning_start.clear();
    auto copy = std::make_unique<Sampler>(vocab_, bare);
    copy->params_ = params_;
    for (size_t i = 0; i < chain_.size(); ++i) {
        // llama.cpp's clone of adaptive_p is broken: the fresh one stays.
        if (chain_[i].sampler && chain_[i].name != "adaptive_p") {
            copy->chain_[i].sampler.reset(llama_sampler_clone(chain_[i].sampler.get()));
        }
    }
    if (grammar_) copy->grammar_.reset(llama_sampler_clone(grammar_.get()));
    if (budget_) copy->budget_ = std::make_unique<ReasoningBudget>(*budget_);
    copy->recent_ = recent_;
    copy->index_ = index_;
    copy->attempt_ = attempt_;
    return copy;
}

std::vector<std::string> Sampler::names() const {
    std::vector<std::string> out;
    if (budget_) out.emplace_back("reasoning_budget");
    if (grammar_) out.emplace_back("grammar");
    for (const Link &link : chain_) {
        out.push_back(link.name);
    }
    if (!selects_itself_) out.emplace_back(greedy_ ? "greedy" : "draw");
    return out;
}

uint32_t Sampler::n_draws() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return index_;
}

void Sampler::seek(uint32_t index) {
    std::lock_guard<std::mutex> lock(mutex_);
    index_ = index;
    attempt_ = 0;
}

}  // namespace kvasir
