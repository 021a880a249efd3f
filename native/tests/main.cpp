// kvasir_native_tests FOLDER [PART OF A NAME]: runs the tests; FOLDER holds the tiny models of `python -m
// tests.models`.
#include "harness.hpp"

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: kvasir_native_tests FOLDER-OF-TINY-MODELS [PART-OF-A-NAME]\n");
        return 2;
    }
    test::models = std::string(argv[1]) + "/";
    const std::string part = argc > 2 ? argv[2] : "";
    int n_passed = 0, n_failed = 0;
    for (const test::Case &c : test::cases()) {
        if (std::string(c.name).find(part) == std::string::npos) continue;
        test::n_wrong = 0;
        try {
            c.run();
        } catch (const std::exception &e) {
            test::wrong(c.name, 0, std::string("thrown: ") + e.what());
        }
        std::printf("%s %s\n", test::n_wrong == 0 ? "ok  " : "FAIL", c.name);
        std::fflush(stdout);
        ++(test::n_wrong == 0 ? n_passed : n_failed);
    }
    std::printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}
