// Draws, the pool, the log, and the trap.
#include <atomic>
#include <limits>
#include <stdexcept>
#include <thread>

#include "core/draw.hpp"
#include "core/pool.hpp"
#include "core/runtime.hpp"
#include "core/schema.hpp"
#include "ggml.h"
#include "harness.hpp"

using kvasir::draw;
using kvasir::Purpose;

TEST(philox_gives_the_published_values) {
    using Block = std::array<uint32_t, 4>;
    EXPECT(kvasir::philox({0, 0, 0, 0}, {0, 0}) == (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    constexpr uint32_t f = 0xffffffff;
    EXPECT(kvasir::philox({f, f, f, f}, {f, f}) == (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT(kvasir::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
           (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(a_draw_is_the_top_53_bits_of_its_block) {
    EXPECT(draw(0, 0, 0, Purpose::Token) == double((0x6627e8d5e169c58dull) >> 11) * 0x1p-53);
    double sum = 0.0;
    for (uint32_t i = 0; i < 10000; ++i) {
        const double x = draw(~0ull, i, 0, Purpose::Token);
        EXPECT(x >= 0.0 && x < 1.0);
        sum += x;
    }
    EXPECT(sum > 4850.0 && sum < 5150.0);
    EXPECT(draw(1, 2, 0, Purpose::Token) != draw(1, 2, 1, Purpose::Token));
    EXPECT(draw(1, 2, 0, Purpose::Token) != draw(1, 2, 0, Purpose::Xtc));
    EXPECT(draw(1, 2, 0, Purpose::Token) != draw(1ull << 32 | 1, 2, 0, Purpose::Token));
}

TEST(the_pool_runs_every_item_once_ten_thousand_times) {
    kvasir::Pool pool(4);
    std::vector<int> seen(7);
    for (int loop = 0; loop < 10000; ++loop) {
        pool.each(seen.size(), [&](size_t i) { ++seen[i]; });
    }
    for (const int n : seen) {
        EXPECT(n == 10000);
    }
    pool.each(0, [&](size_t) { EXPECT(false); });
}

TEST(an_exception_in_the_pool_reaches_the_caller_after_all_items_ran) {
    for (const size_t n_threads : {1, 2, 4}) {
        kvasir::Pool pool(n_threads);
        for (int loop = 0; loop < 500; ++loop) {
            std::atomic<int> n_ran{0};
            bool caught = false;
            try {
                pool.each(8, [&](size_t i) {
                    ++n_ran;
                    if (i % 3 == 0) throw std::runtime_error("no");
                });
            } catch (const std::runtime_error &) {
                caught = true;
            }
            EXPECT(caught && n_ran == 8);
            pool.each(8, [&](size_t) { ++n_ran; });
            EXPECT(n_ran == 16);
        }
    }
}

static void log_line(const std::string &text) {
    ggml_log_callback callback = nullptr;
    void *data = nullptr;
    ggml_log_get(&callback, &data);
    callback(GGML_LOG_LEVEL_WARN, (text + "\n").c_str(), data);
}

TEST(the_log_queue_keeps_the_newest_lines_and_says_what_it_dropped) {
    kvasir::ensure_backend();
    kvasir::take_logs(0.0);
    std::vector<std::thread> writers;
    for (int t = 0; t < 4; ++t) {
        writers.emplace_back([] {
            for (int i = 0; i < 2000; ++i) log_line("line " + std::to_string(i));
        });
    }
    for (std::thread &writer : writers) {
        writer.join();
    }
    const auto lines = kvasir::take_logs(1.0);
    EXPECT(lines.size() == 4097);
    EXPECT(lines.back().first == 30 && lines.back().second.find("3904 earlier") == 0);
    EXPECT(kvasir::take_logs(0.0).empty());
}

TEST(waiting_for_logs_takes_any_number) {
    for (const double wait_s :
         {-1.0, 0.0, 1e-9, std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
        EXPECT(kvasir::take_logs(wait_s).empty());
    }
    std::thread writer([] { log_line("late"); });
    EXPECT(kvasir::take_logs(std::numeric_limits<double>::infinity()).size() == 1);
    writer.join();
}

TEST(a_capture_takes_the_lines_of_its_own_thread_and_scope) {
    kvasir::LogCapture outer;
    log_line("llama_thing: first");
    {
        kvasir::LogCapture inner;
        log_line("second");
        std::thread([] { log_line("elsewhere"); }).join();
        EXPECT(inner.reason("none") == "second");
    }
    log_line("third");
    EXPECT(outer.reason("none") == "first; third");
    EXPECT(kvasir::LogCapture().reason("none") == "none");
    kvasir::take_logs(0.0);
}

TEST(a_trap_turns_assertions_into_errors_and_nests) {
    kvasir::ensure_backend();
    for (int i = 0; i < 100; ++i) {
        REFUSED(Unsupported,
                kvasir::with_abort_trap(kvasir::Kind::Unsupported, "testing", [] { GGML_ABORT("x %d", 1); }));
    }
    bool went_on = false;
    REFUSED(BadOption, kvasir::with_abort_trap(kvasir::Kind::BadOption, "outer", [&] {
                try {
                    kvasir::with_abort_trap(kvasir::Kind::BadSchema, "inner", [] { GGML_ASSERT(1 == 2); });
                } catch (const kvasir::Error &e) {
                    EXPECT(e.kind == kvasir::Kind::BadSchema);
                }
                kvasir::without_abort_trap(
                    [&] { kvasir::with_abort_trap(kvasir::Kind::BadSchema, "callback", [&] { went_on = true; }); });
                GGML_ABORT("still trapped");
            }));
    EXPECT(went_on);
}

TEST(schemas_become_grammars_or_errors) {
    EXPECT(kvasir::json_schema_to_gbnf(R"({"type": "object", "properties": {"a": {"type": "integer"}}})")
               .find("root ::=") != std::string::npos);
    for (const char *bad : {"", "{", "[1", "nul", R"({"type": "nonsense"})", R"({"$ref": "#/nowhere"})", "\xff\xfe",
                            R"({"type": "string", "pattern": "^($"})"}) {
        REFUSED(BadSchema, kvasir::json_schema_to_gbnf(bad));
    }
    std::string deep;
    for (int i = 0; i < 100000; ++i) {
        deep += R"({"type":"array","items":)";
    }
    REFUSED(BadSchema, kvasir::json_schema_to_gbnf(deep + "{}" + std::string(100000, '}')));
    REFUSED(BadSchema, kvasir::json_schema_to_gbnf(std::string(1000000, '[')));
}
