// Steps: what is refused, what is counted, aborts, and two threads on one context.
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "rig.hpp"

using namespace test;

TEST(bad_rows_are_refused_and_change_nothing) {
    auto model = load();
    auto ctx = context(*model);
    const int32_t n_vocab = model->vocab().n_tokens();
    REFUSED(BadOption, step(*ctx, {}));
    REFUSED(BadOption, step(*ctx, {row(-1, 0, {97})}));
    REFUSED(BadOption, step(*ctx, {row(4, 0, {97})}));
    REFUSED(BadOption, step(*ctx, {row(0, -1, {97})}));
    REFUSED(BadOption, step(*ctx, {row(0, 0, {})}));
    REFUSED(BadOption, step(*ctx, {row(0, 0, {-1})}));
    REFUSED(BadOption, step(*ctx, {row(0, 0, {n_vocab})}));
    REFUSED(BadOption, step(*ctx, {row(0, 0, {97}), row(0, 1, {97})}));
    REFUSED(BadOption, step(*ctx, {row(0, 0, Tokens(513, 97))}));
    REFUSED(BadOption, step(*ctx, {row(0, INT32_MAX, {97, 98})}));
    kvasir::Row negative = row(0, 0, {97}, std::make_shared<kvasir::Sampler>(model->vocab(), kvasir::SamplerParams()));
    negative.logprobs = -1;
    REFUSED(BadOption, step(*ctx, {negative}));
    EXPECT(ctx->n_rows_decoded() == 0 && kvasir::Memory(ctx).used_cells() == 0);
    EXPECT(feed(*ctx, 0, some_tokens(16)));
    EXPECT(step(*ctx, {row(0, 8, {97})}).status == "bad_batch");
    EXPECT(step(*ctx, {row(0, 40, {97})}).status == "bad_batch");
    EXPECT(ctx->n_rows_decoded() == 16);
}

TEST(logits_belong_to_rows_of_the_last_step_that_asked) {
    auto model = load();
    auto ctx = context(*model);
    auto sampler = std::make_shared<kvasir::Sampler>(model->vocab(), kvasir::SamplerParams());
    REFUSED(BadOption, ctx->logits(0));
    EXPECT(step(*ctx, {row(0, 0, {97, 98}), row(1, 0, {99}, nullptr, true)}).status == "ok");
    REFUSED(BadOption, ctx->logits(0));
    REFUSED(BadOption, ctx->logits(-1));
    REFUSED(BadOption, ctx->logits(2));
    REFUSED(BadOption, ctx->sample(*sampler, 0));
    EXPECT(ctx->logits(1).size() == static_cast<size_t>(model->vocab().n_tokens()));
    EXPECT(ctx->sample(*sampler, 1) >= 0);
    auto words = load("bert");
    kvasir::Sampler foreign(words->vocab(), kvasir::SamplerParams());
    REFUSED(BadOption, ctx->sample(foreign, 1));
    REFUSED(BadOption,
            step(*ctx, {row(0, 2, {97}, std::make_shared<kvasir::Sampler>(words->vocab(), kvasir::SamplerParams()))}));
    step(*ctx, {row(0, 7, {97}, nullptr, true)});  // a hole: refused by llama.cpp
    REFUSED(BadOption, ctx->logits(0));
}

TEST(stored_logits_give_the_token_they_gave_before) {
    auto model = load();
    auto ctx = context(*model);
    const auto made = [&] { return std::make_shared<kvasir::Sampler>(model->vocab(), kvasir::SamplerParams()); };
    const auto there = made(), later = made();
    const auto first = step(*ctx, {row(0, 0, {97, 98}, there)});
    const std::vector<float> logits = ctx->logits(0);
    const auto again = ctx->sample_stored(*later, logits, 3);
    EXPECT(again.status == "ok" && again.tokens == first.tokens && again.logprobs[0]->top.size() == 3);
    EXPECT(ctx->n_rows_decoded() == 2);
    const std::vector<float> nothing(logits.size(), NAN);
    EXPECT(ctx->sample_stored(*later, nothing, std::nullopt).status == "ok");  // a token or an error, never a crash
    for (const size_t n : {size_t{0}, logits.size() - 1, logits.size() + 1}) {
        REFUSED(BadOption, ctx->sample_stored(*later, std::vector<float>(n), std::nullopt));
    }
    REFUSED(BadOption, ctx->sample_stored(*later, logits, -1));
    auto words = load("bert");
    kvasir::Sampler foreign(words->vocab(), kvasir::SamplerParams());
    REFUSED(BadOption, ctx->sample_stored(foreign, logits, std::nullopt));
    ctx->close();
    REFUSED(Closed, ctx->sample_stored(*later, logits, std::nullopt));
}

TEST(a_full_memory_says_so_and_keeps_what_it_had) {
    for (const bool unified : {true, false}) {
        auto model = load();
        kvasir::ContextParams p = params(unified, 2);
        p.n_ctx = 512;
        auto ctx = context(*model, p);
        kvasir::Memory memory(ctx);
        EXPECT(feed(*ctx, 0, some_tokens(250)));
        EXPECT(feed(*ctx, 1, some_tokens(250)));
        const auto full = step(*ctx, {row(0, 250, some_tokens(200)), row(1, 250, some_tokens(200))});
        EXPECT(full.status == "no_room" && memory.pos_max(0) == 249 && memory.pos_max(1) == 249);
        EXPECT(ctx->n_rows_decoded() == 500);
        EXPECT(feed(*ctx, 0, {97}, 250));
    }
}

TEST(every_row_of_a_step_is_sampled) {
    auto model = load();
    kvasir::ContextParams p = params(true, 8);
    p.sample_threads = 4;
    auto ctx = context(*model, p);
    std::vector<kvasir::Row> rows;
    for (int seq = 0; seq < 8; ++seq) {
        kvasir::SamplerParams sp;
        sp.seed = static_cast<uint64_t>(seq);
        rows.push_back(row(seq, 0, some_tokens(5 + seq), std::make_shared<kvasir::Sampler>(model->vocab(), sp)));
        rows.back().logprobs = seq == 7 ? 100000 : seq;
    }
    for (int i = 0; i < 30; ++i) {
        const auto done = step(*ctx, rows);
        EXPECT(done.status == "ok");
        for (size_t seq = 0; seq < 8; ++seq) {
            EXPECT(done.tokens[seq] && !done.errors[seq] && done.logprobs[seq] && done.logprobs[seq]->logprob <= 0.0f);
            EXPECT(done.logprobs[seq]->top.size() == (seq == 7 ? static_cast<size_t>(model->vocab().n_tokens()) : seq));
            rows[seq].pos += static_cast<llama_pos>(rows[seq].tokens.size());
            rows[seq].tokens = {*done.tokens[seq]};
        }
    }
}

TEST(two_threads_on_one_context_are_slow_and_right) {
    auto model = load();
    auto ctx = context(*model);
    kvasir::Memory memory(ctx);
    std::vector<std::thread> threads;
    for (int seq = 0; seq < 3; ++seq) {
        threads.emplace_back([&, seq] {
            for (int i = 0; i < 60; ++i) {
                EXPECT(feed(*ctx, seq, {97 + seq}, i));
                EXPECT(memory.pos_max(seq) == i);
                if (i % 20 == 19) EXPECT(!memory.state(seq, false).empty());
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    EXPECT(ctx->n_rows_decoded() == 180 && memory.used_cells() == 180);
    auto alone = context(*model);
    for (int i = 0; i < 60; ++i) {
        feed(*alone, 1, {98}, i);
    }
    kvasir::Memory other(alone);
    EXPECT(probe(*alone, other, 1) == probe(*ctx, memory, 1));
}

TEST(an_abort_stops_a_long_decode_and_what_was_decoded_is_counted) {
    auto model = load();
    kvasir::ContextParams p = params();
    p.n_ctx = 2048, p.n_batch = 2048, p.n_ubatch = 32, p.threads = 2;
    int n_aborted = 0;
    for (int delay_us = 0; delay_us < 60000; delay_us += 3000) {
        auto ctx = context(*model, p);
        kvasir::Memory memory(ctx);
        std::thread stopper([&] {
            std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
            ctx->abort();
        });
        const auto done = step(*ctx, {row(0, 0, some_tokens(2000))});
        stopper.join();
        EXPECT(done.status == "ok" || done.status == "aborted");
        n_aborted += done.status == "aborted" ? 1 : 0;
        EXPECT(ctx->n_rows_decoded() == static_cast<uint64_t>(memory.pos_max(0).value_or(-1) + 1));
        EXPECT(step(*ctx, {row(1, 0, {97})}).status == "aborted");
        ctx->clear_abort();
        EXPECT(step(*ctx, {row(1, 0, {97})}).status == "ok");
    }
    EXPECT(n_aborted > 0);
}

TEST(closing_ends_a_decode_in_another_thread) {
    auto model = load();
    kvasir::ContextParams p = params();
    p.n_ctx = 2048, p.n_batch = 2048, p.n_ubatch = 32;
    auto ctx = context(*model, p);
    std::thread worker([&] {
        try {
            for (int i = 0; i < 1000; ++i) {
                step(*ctx, {row(0, 0, some_tokens(2000))});
                kvasir::Memory(ctx).clear();
            }
            EXPECT(false);
        } catch (const kvasir::Error &e) {
            EXPECT(e.kind == kvasir::Kind::Closed);
        }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ctx->close();
    worker.join();
}

TEST(an_abort_never_interrupts_a_shift) {
    auto model = load();
    auto ctx = context(*model);
    kvasir::Memory memory(ctx);
    EXPECT(feed(*ctx, 0, some_tokens(300)));
    ctx->abort();
    memory.shift(0, 0, std::nullopt, 64);
    ctx->clear_abort();
    auto other = context(*model);
    kvasir::Memory expected(other);
    EXPECT(feed(*other, 0, some_tokens(300)));
    expected.shift(0, 0, std::nullopt, 64);
    EXPECT(probe(*ctx, memory, 0) == probe(*other, expected, 0));
}

TEST(embeddings_are_refused_where_llama_cpp_would_abort) {
    for (const char *name : {"bert", "rank", "llama"}) {
        auto model = load(name);
        kvasir::ContextParams p = params();
        p.embeddings = true, p.n_ubatch = 64;
        p.pooling = std::string(name) == "llama" ? "mean" : "model";
        auto ctx = context(*model, p);
        const Tokens text(64, 7);
        const size_t n = ctx->embed({Tokens(5, 9), text, {3}, {4}, {5}, {6}, {7}}).size();
        EXPECT(n > 0 && n % 7 == 0);
        EXPECT(ctx->n_rows_decoded() == 74);
        REFUSED(BadOption, ctx->embed({Tokens(65, 7)}));
        REFUSED(BadOption, ctx->embed({{}}));
        REFUSED(BadOption, ctx->embed({{1 << 30}}));
        REFUSED(BadOption, ctx->embed_tokens({3}));
        REFUSED(BadOption, step(*ctx, {row(0, 0, {3})}));
        EXPECT(ctx->embed({}).empty());
        ctx->abort();
        REFUSED(EngineStopped, ctx->embed({{3}}));
        ctx->clear_abort();
        EXPECT(!ctx->embed({{3}}).empty());
    }
    auto encoder = load("bert");
    auto ctx = context(*encoder);
    REFUSED(BadOption, step(*ctx, {row(0, 0, {3})}));
    REFUSED(BadOption, ctx->embed({{3}}));
    REFUSED(Unsupported, kvasir::Memory(ctx).pos_max(0));
    auto model = load();
    kvasir::ContextParams p = params();
    p.attention = "non_causal", p.n_ubatch = 64;
    auto all = context(*model, p);
    REFUSED(BadOption, step(*all, {row(0, 0, some_tokens(65))}));
    EXPECT(step(*all, {row(0, 0, some_tokens(64))}).status == "ok");
    p = params();
    p.pooling = "none", p.embeddings = true;
    auto plain = context(*model, p);
    EXPECT(plain->embed_tokens(some_tokens(9)).size() == 9 * static_cast<size_t>(model->n_embd_out()));
}

TEST(every_kind_of_memory_steps_with_every_layout_and_thread_count) {
    for (const char *name : {"llama", "gemma3", "mamba", "lfm2"}) {
        auto model = load(name);
        for (const bool unified : {true, false}) {
            for (const int threads : {1, 3}) {
                kvasir::ContextParams p = params(unified);
                p.threads = threads;
                auto ctx = context(*model, p);
                EXPECT(
                    step(*ctx, {row(0, 0, some_tokens(40)), row(1, 0, some_tokens(3)), row(3, 0, {97}, nullptr, true)})
                        .status == "ok");
                EXPECT(step(*ctx, {row(3, 1, {98}, nullptr, true), row(0, 40, {97})}).status == "ok");
                EXPECT(ctx->logits(0).size() == static_cast<size_t>(model->vocab().n_tokens()));
                REFUSED(BadOption, ctx->set_threads(0, 1));
                REFUSED(BadOption, ctx->set_threads(1, threads + 1));
                ctx->set_threads(1, threads);
                EXPECT(ctx->threads() == 1 && ctx->threads_batch() == threads);
                EXPECT(feed(*ctx, 2, some_tokens(20)));
            }
        }
    }
}
