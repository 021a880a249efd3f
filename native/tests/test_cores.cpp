// The process's cores are never lent twice, and everybody gets them in turn.
#include <atomic>
#include <thread>
#include <vector>

#include "core/cores.hpp"
#include "harness.hpp"

TEST(cores_are_never_lent_twice) {
    kvasir::Cores cores(4);
    std::atomic<int> used{0}, most{0}, done{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < 500; ++i) {
                const int n = 1 + (t + i) % 6;  // more than there are, too
                const kvasir::CoreLease lease(cores, n);
                const int now = used += n < 4 ? n : 4;
                for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
                }
                used -= n < 4 ? n : 4;
            }
            ++done;
        });
    }
    for (std::thread &thread : threads) thread.join();
    EXPECT(most <= 4);
    EXPECT(done == 8);
}
