// The whole test framework: a test registers itself, a failed expectation is printed and counted, the rest goes on.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace test {

struct Case {
    const char *name;
    void (*run)();
};

inline std::vector<Case> &cases() {
    static std::vector<Case> all;
    return all;
}

inline int n_wrong = 0;     // failed expectations of the running test
inline std::string models;  // the folder of tiny models, with a slash at its end

inline std::string model(const char *name) { return models + name + ".gguf"; }

struct Register {
    Register(const char *name, void (*run)()) { cases().push_back({name, run}); }
};

inline void wrong(const char *file, int line, const std::string &what) {
    std::printf("  %s:%d: %s\n", file, line, what.c_str());
    ++n_wrong;
}

// Which kind of Error `work` ends with; "" for none. Any other exception is a failure of its own.
inline bool refused(const char *file, int line, kvasir::Kind kind, const std::function<void()> &work) {
    try {
        work();
        wrong(file, line, "nothing was thrown");
    } catch (const kvasir::Error &e) {
        if (e.kind == kind && e.what()[0] != '\0') return true;
        wrong(file, line, std::string("the wrong kind of error: ") + e.what());
    } catch (const std::exception &e) {
        wrong(file, line, std::string("an untyped exception: ") + e.what());
    }
    return false;
}

}  // namespace test

#define TEST(name)                                            \
    static void name();                                       \
    static const test::Register register_##name(#name, name); \
    static void name()
#define EXPECT(what) ((what) ? (void)0 : test::wrong(__FILE__, __LINE__, #what))
#define REFUSED(kind, work) test::refused(__FILE__, __LINE__, kvasir::Kind::kind, [&] { work; })
