// Memory: share, remove, shift, spans and states in both layouts, and bytes from elsewhere.
#include "rig.hpp"

using namespace test;

namespace {

const char *const KINDS[] = {"llama", "gemma3", "mamba", "lfm2"};

struct Rig {
    std::unique_ptr<kvasir::Model> model;
    std::shared_ptr<kvasir::Context> context;
    kvasir::Memory memory;

    explicit Rig(const char *name, bool unified = true)
        : model(load(name)), context(test::context(*model, params(unified))), memory(context) {}
    std::vector<float> next(llama_seq_id seq) { return probe(*context, memory, seq); }
};

std::vector<float> fresh(const char *name, bool unified, const Tokens &tokens) {
    Rig rig(name, unified);
    feed(*rig.context, 0, tokens);
    return rig.next(0);
}

bool near(const std::vector<float> &a, const std::vector<float> &b) {
    float most = a.size() == b.size() && !a.empty() ? 0.0f : 1e9f;
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
        most = std::max(most, std::abs(a[i] - b[i]));
    }
    return most < 1e-3f;
}

// Whatever was done to it, a memory must still be able to do its work.
void expect_usable(Rig &rig) {
    rig.memory.clear();
    EXPECT(feed(*rig.context, 0, some_tokens(24)));
    EXPECT(rig.memory.pos_max(0) == 23);
    rig.memory.clear();
    EXPECT(rig.memory.used_cells() == 0);
}

}  // namespace

TEST(a_shared_prefix_is_what_decoding_it_would_have_given) {
    const Tokens tokens = some_tokens(40);
    for (const char *name : KINDS) {
        for (const bool unified : {true, false}) {
            Rig rig(name, unified);
            EXPECT(feed(*rig.context, 0, tokens));
            EXPECT(rig.memory.share(0, 2, 40));
            EXPECT(near(rig.next(2), fresh(name, unified, tokens)));
            const bool cut = rig.memory.share(0, 1, 30);
            EXPECT(cut == (rig.model->memory_kind() == "plain" || rig.model->memory_kind() == "window"));
            if (cut) EXPECT(near(rig.next(1), fresh(name, unified, Tokens(tokens.begin(), tokens.begin() + 30))));
            if (!cut) EXPECT(!rig.memory.pos_max(1));
            rig.memory.keep(2);
            EXPECT(!rig.memory.pos_max(0) && rig.memory.pos_max(2) == 40);
            REFUSED(BadOption, rig.memory.share(2, 2, 1));
            REFUSED(BadOption, rig.memory.share(2, 1, 42));
            REFUSED(BadOption, rig.memory.share(2, 1, -1));
            REFUSED(BadOption, rig.memory.share(-1, 1, 1));
            REFUSED(BadOption, rig.memory.share(2, 99, 1));
        }
    }
}

TEST(extreme_numbers_are_refused_or_harmless) {
    for (const bool unified : {true, false}) {
        Rig rig("llama", unified);
        EXPECT(feed(*rig.context, 0, some_tokens(8)));
        REFUSED(BadOption, rig.memory.remove(0, -1, 4));
        REFUSED(BadOption, rig.memory.remove(0, 5, 4));
        REFUSED(BadOption, rig.memory.shift(0, 0, std::nullopt, INT32_MIN));
        REFUSED(BadOption, rig.memory.shift(0, 4, std::nullopt, INT32_MAX));
        REFUSED(BadOption, rig.memory.shift(0, 4, std::nullopt, -1));
        REFUSED(BadOption, rig.memory.shift(0, 0, 4, 2));
        REFUSED(BadOption, rig.memory.export_span(0, INT32_MIN, INT32_MAX, "base"));
        REFUSED(BadOption, rig.memory.export_span(0, 0, INT32_MAX, "base"));
        REFUSED(Unsupported, rig.memory.export_span(0, 0, 1, "window"));
        EXPECT(rig.memory.remove(0, INT32_MAX, std::nullopt) && rig.memory.remove(0, INT32_MAX, INT32_MAX));
        EXPECT(rig.memory.pos_max(0) == 7);
        EXPECT(rig.memory.remove(0, 0, INT32_MAX) && !rig.memory.pos_max(0));
        EXPECT(feed(*rig.context, 0, {97, 98}, INT32_MAX - 8));
        const std::string span = rig.memory.export_span(0, INT32_MAX - 8, INT32_MAX - 6, "base");
        for (int i = 0; i < 3; ++i) {
            EXPECT(rig.memory.import_span(0, INT32_MAX - 6 + 2 * i, {span}, "base"));
        }
        REFUSED(BadOption, rig.memory.import_span(0, INT32_MAX, {span}, "base"));
        expect_usable(rig);
    }
}

TEST(a_shift_of_shared_cells_moves_one_sequence_and_keeps_its_holes) {
    Rig rig("llama");
    EXPECT(feed(*rig.context, 0, some_tokens(40)));
    EXPECT(rig.memory.share(0, 1, 40) && rig.memory.remove(0, 10, 20));
    rig.memory.shift(0, 0, std::nullopt, 5);
    EXPECT(rig.memory.pos_min(0) == 5 && rig.memory.pos_max(0) == 44 && rig.memory.pos_max(1) == 39);
    REFUSED(BadOption, rig.memory.export_span(0, 10, 20, "base"));
    EXPECT(!rig.memory.export_span(0, 25, 45, "base").empty());
    EXPECT(rig.memory.used_cells() == 70);
    EXPECT(near(rig.next(1), fresh("llama", true, some_tokens(40))));
}

TEST(spans_move_between_layouts_bit_for_bit) {
    const Tokens tokens = some_tokens(60);
    for (const char *name : {"llama", "gemma3"}) {
        for (const bool from : {true, false}) {
            for (const bool to : {true, false}) {
                Rig a(name, from), b(name, to);
                EXPECT(feed(*a.context, 1, tokens));
                for (const char *part : {"base", "window"}) {
                    if (std::string(part) == "window" && a.model->n_swa() == 0) continue;
                    const std::string whole = a.memory.export_span(1, 0, 60, part);
                    EXPECT(b.memory.import_span(
                        3, 0, {a.memory.export_span(1, 0, 7, part), a.memory.export_span(1, 7, 60, part)}, part));
                    EXPECT(b.memory.export_span(3, 0, 60, part) == whole);
                    REFUSED(BadOption, b.memory.import_span(3, 7, {whole}, part));
                }
                EXPECT(near(b.next(3), a.next(1)));
                EXPECT(b.memory.import_span(0, 0, {}, "base") && !b.memory.pos_max(0));
            }
        }
    }
}

TEST(a_span_without_room_changes_nothing) {
    for (const bool unified : {true, false}) {
        Rig rig("llama", unified);
        EXPECT(feed(*rig.context, 0, some_tokens(200)));
        const std::string span = rig.memory.export_span(0, 0, 200, "base");
        const uint64_t before = rig.memory.used_cells();
        EXPECT(!rig.memory.import_span(1, 0, std::vector<std::string_view>(6, span), "base"));
        EXPECT(rig.memory.used_cells() == before && !rig.memory.pos_max(1));
    }
}

TEST(foreign_spans_are_refused_whatever_their_length_or_header) {
    std::mt19937 random(7);
    for (const bool unified : {true, false}) {
        Rig rig("llama", unified);
        EXPECT(feed(*rig.context, 0, some_tokens(4)));
        const std::string good = rig.memory.export_span(0, 0, 4, "base");
        for (size_t n = 0; n < good.size(); ++n) {
            REFUSED(BadOption, rig.memory.import_span(1, 0, {good.substr(0, n)}, "base"));
        }
        REFUSED(BadOption, rig.memory.import_span(1, 0, {good + "x"}, "base"));
        REFUSED(BadOption, rig.memory.import_span(1, 0, {good, ""}, "base"));
        const size_t header = 16 + 8 * 2 * static_cast<size_t>(rig.model->n_layer());
        for (int i = 0; i < 3000; ++i) {
            std::string bad = good;
            for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
                bad[random() % header] = static_cast<char>(random());
            }
            if (bad == good) continue;
            REFUSED(BadOption, rig.memory.import_span(1, 0, {bad}, "base"));
        }
        EXPECT(!rig.memory.pos_max(1) && rig.memory.import_span(1, 0, {good}, "base"));
        Rig other("gemma3", unified);
        REFUSED(BadOption, other.memory.import_span(0, 0, {good}, "base"));
        REFUSED(BadOption, rig.memory.import_span(1, 4, {good}, "sideways"));
    }
    REFUSED(Unsupported, Rig("mamba").memory.export_span(0, 0, 1, "base"));
}

TEST(states_come_back_and_broken_ones_leave_an_empty_sequence) {
    std::mt19937 random(11);
    for (const char *name : KINDS) {
        for (const bool unified : {true, false}) {
            Rig rig(name, unified);
            EXPECT(feed(*rig.context, 0, some_tokens(12)));
            EXPECT(feed(*rig.context, 3, some_tokens(5)));
            const std::string good = rig.memory.state(0, false);
            EXPECT(rig.memory.set_state(1, good, false));
            EXPECT(near(rig.next(1), rig.next(0)));
            const std::string partial = rig.memory.state(0, true);
            EXPECT(!partial.empty());
            for (size_t n = 0; n < good.size(); n += 1 + n / 40) {
                EXPECT(!rig.memory.set_state(1, good.substr(0, n), false) && !rig.memory.pos_max(1));
            }
            EXPECT(!rig.memory.set_state(1, good + "x", false) && !rig.memory.pos_max(1));
            for (int i = 0; i < 500; ++i) {
                std::string bad = good;
                const size_t reach = i % 2 == 0 ? 200 : bad.size();
                for (uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
                    bad[random() % std::min(reach, bad.size())] = static_cast<char>(random() % 3 == 0 ? 255 : random());
                }
                try {
                    rig.memory.set_state(1, bad, random() % 8 == 0);
                } catch (const kvasir::Error &) {
                    EXPECT(false);
                }
                EXPECT(rig.memory.pos_max(3) == 4);
                if (i % 100 == 0)
                    EXPECT(rig.memory.remove(1, 0, std::nullopt) && !rig.memory.pos_max(1) &&
                           feed(*rig.context, 1, {97, 98}));
            }
            expect_usable(rig);
        }
    }
}
