// Who keeps whom alive: every order of letting go, twice, and use afterwards.
#include <algorithm>
#include <atomic>
#include <thread>

#include "rig.hpp"

using namespace test;

TEST(models_contexts_and_vocabularies_die_in_every_order) {
    std::vector<int> order = {0, 1, 2, 3, 4};
    do {
        auto model = load();
        auto vocab = std::make_unique<kvasir::Vocab>(model->vocab());
        auto sampler = std::make_shared<kvasir::Sampler>(*vocab, kvasir::SamplerParams());
        auto ctx = context(*model);
        auto memory = std::make_unique<kvasir::Memory>(ctx);
        EXPECT(feed(*ctx, 0, {97, 98}));
        for (const int next : order) {
            if (next == 0) model.reset();
            if (next == 1) vocab.reset();
            if (next == 2) sampler.reset();
            if (next == 3) ctx.reset();
            if (next == 4) memory.reset();
            if (ctx) EXPECT(step(*ctx, {row(1, 0, {99})}).status == "ok" && ctx->n_rows_decoded() > 0);
            if (ctx) kvasir::Memory(ctx).clear();
            if (vocab) EXPECT(vocab->tokenize("ab", false, false).size() == 2);
            if (memory) EXPECT(memory->n_cells() == 1024);
        }
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST(closing_twice_is_harmless_and_use_after_it_raises) {
    auto model = load();
    const kvasir::Vocab vocab = model->vocab();
    auto sampler = std::make_shared<kvasir::Sampler>(vocab, kvasir::SamplerParams());
    auto ctx = context(*model);
    kvasir::Memory memory(ctx);
    EXPECT(step(*ctx, {row(0, 0, {97}, sampler)}).status == "ok");
    model->close();
    model->close();
    EXPECT(model->closed());
    REFUSED(Closed, model->vocab());
    REFUSED(Closed, model->metadata());
    REFUSED(Closed, model->description());
    REFUSED(Closed, model->load_adapter(test::model("lora")));
    REFUSED(Closed, context(*model));
    EXPECT(step(*ctx, {row(0, 1, {97}, sampler)}).status == "ok");  // the context holds the weights
    ctx->close();
    ctx->close();
    EXPECT(ctx->closed());
    REFUSED(Closed, step(*ctx, {row(0, 2, {97})}));
    REFUSED(Closed, ctx->logits(0));
    REFUSED(Closed, ctx->sample(*sampler, 0));
    REFUSED(Closed, ctx->n_ctx());
    REFUSED(Closed, ctx->threads());
    REFUSED(Closed, ctx->pooling());
    REFUSED(Closed, ctx->set_threads(1, 1));
    REFUSED(Closed, ctx->set_adapters({}));
    REFUSED(Closed, ctx->synchronize());
    REFUSED(Closed, memory.pos_max(0));
    REFUSED(Closed, memory.used_cells());
    REFUSED(Closed, memory.share(0, 1, 1));
    REFUSED(Closed, memory.export_span(0, 0, 1, "base"));
    REFUSED(Closed, memory.state(0, false));
    REFUSED(Closed, memory.clear());
    EXPECT(sampler->sample(some_logits(vocab.n_tokens(), 1).data()) >= 0);  // so do the vocabulary and the sampler
}

TEST(closing_from_many_threads_at_once) {
    auto model = load();
    auto ctx = context(*model);
    std::atomic<int> n_refused{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < 200; ++i) {
                try {
                    if (i == 20 + 10 * t) ctx->close();
                    if (i == 60 + 10 * t) model->close();
                    EXPECT(ctx->n_ctx() == 1024 && ctx->threads() == 1);
                    EXPECT(model->vocab().n_tokens() > 0 && !model->metadata().empty());
                    ctx->synchronize();
                } catch (const kvasir::Error &) {
                    ++n_refused;
                }
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    EXPECT(n_refused > 0 && model->closed() && ctx->closed());
}

TEST(adapters_live_as_long_as_they_are_used) {
    auto model = load();
    auto adapter = model->load_adapter(test::model("lora"));
    auto ctx = context(*model);
    ctx->set_adapters({{adapter->handle(), 0.5f}});
    adapter->close();
    adapter->close();
    REFUSED(Closed, adapter->metadata());
    model.reset();
    EXPECT(feed(*ctx, 0, {97, 98, 99}));
    ctx->set_adapters({});
    EXPECT(feed(*ctx, 1, {97}));

    auto other = load();
    auto foreign = other->load_adapter(test::model("lora"));
    other.reset();  // the adapter keeps its model
    REFUSED(BadOption, ctx->set_adapters({{foreign->handle(), 1.0f}}));
    auto third = load();
    REFUSED(BadOption, kvasir::Context(*third, params(), {{foreign->handle(), 1.0f}}));  // and leaks nothing
    REFUSED(ModelLoadError, third->load_adapter(test::model("llama")));
    REFUSED(ModelLoadError, third->load_adapter("nowhere.gguf"));
}

TEST(adapters_come_and_go_in_many_threads) {
    auto model = load();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            for (int i = 0; i < 20; ++i) {
                EXPECT(!model->load_adapter(test::model("lora"))->metadata().empty());
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

TEST(a_progress_callback_may_stop_throw_or_load_another_model) {
    kvasir::ModelParams p;
    p.progress = [](float) { return false; };
    REFUSED(ModelLoadError, kvasir::Model::load(test::model("llama"), p));
    p.progress = [](float) -> bool { throw kvasir::Error(kvasir::Kind::Closed, "mine"); };
    REFUSED(Closed, kvasir::Model::load(test::model("llama"), p));
    p.progress = [](float fraction) -> bool {
        if (fraction > 0.3f) throw kvasir::Error(kvasir::Kind::Closed, "later");
        return true;
    };
    REFUSED(Closed, kvasir::Model::load(test::model("llama"), p));
    int n_inner = 0;
    p.progress = [&](float) {
        auto inner = load("mamba");
        auto ctx = context(*inner);
        n_inner += feed(*ctx, 0, {97, 98}) ? 1 : 0;
        REFUSED(ModelNotFound, kvasir::Model::load("nowhere.gguf", {}));
        return true;
    };
    EXPECT(kvasir::Model::load(test::model("llama"), p)->n_layer() > 0);
    EXPECT(n_inner > 0);
}

TEST(a_model_without_weights_has_a_vocabulary_and_no_contexts) {
    kvasir::ModelParams p;
    p.vocab_only = true;
    auto model = kvasir::Model::load(test::model("llama"), p);
    EXPECT(model->vocab_only() && model->n_head() == 0 && model->vocab().n_tokens() > 0);
    REFUSED(Unsupported, context(*model));
    REFUSED(Unsupported, model->load_adapter(test::model("lora")));
}

TEST(impossible_load_options_are_refused) {
    kvasir::ModelParams p;
    p.split_mode = "diagonal";
    REFUSED(BadOption, kvasir::Model::load(test::model("llama"), p));
    p = {};
    p.devices = {"abacus"};
    REFUSED(BadOption, kvasir::Model::load(test::model("llama"), p));
    p = {};
    p.tensor_split = std::vector<float>(1000, 1.0f);
    REFUSED(BadOption, kvasir::Model::load(test::model("llama"), p));
    p.tensor_split = {1.0f, NAN};
    REFUSED(BadOption, kvasir::Model::load(test::model("llama"), p));
    p.tensor_split = {-1.0f};
    REFUSED(BadOption, kvasir::Model::load(test::model("llama"), p));
}

TEST(impossible_context_options_are_refused) {
    auto model = load();
    using Edit = void (*)(kvasir::ContextParams &);
    const Edit edits[] = {
        [](auto &p) { p.n_ctx = -1; },
        [](auto &p) { p.n_ctx = int64_t(1) << 40; },
        [](auto &p) { p.n_batch = 0; },
        [](auto &p) { p.n_ubatch = -5; },
        [](auto &p) { p.n_seq_max = 0; },
        [](auto &p) { p.n_seq_max = 257; },
        [](auto &p) { p.n_batch = 3; },
        [](auto &p) { p.n_ctx = 2; },
        [](auto &p) { p.threads = -1; },
        [](auto &p) { p.threads = 100000; },
        [](auto &p) { p.sample_threads = -1; },
        [](auto &p) { p.poll = 101; },
        [](auto &p) { p.type_k = "q9_9"; },
        [](auto &p) { p.pooling = "max"; },
        [](auto &p) { p.attention = "much"; },
        [](auto &p) { p.flash_attn = "yes"; },
        [](auto &p) { p.rope_scaling = "up"; },
        [](auto &p) { p.yarn_orig_ctx = -1; },
        [](auto &p) { p.flash_attn = "off", p.type_v = "q8_0"; },
    };
    for (const Edit edit : edits) {
        kvasir::ContextParams p = params();
        edit(p);
        REFUSED(BadOption, context(*model, p));
    }
}
