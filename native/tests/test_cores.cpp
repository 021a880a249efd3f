// The process's cores are never lent twice, everybody gets them in turn, and threads are shared where cores are.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "core/cores.hpp"
#include "core/threads.hpp"
#include "rig.hpp"

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

TEST(threads_are_shared_where_two_pools_would_not_fit_the_cores) {
    const int32_t count = kvasir::Cores::of_process().count(), n = std::min(count, 64);
    const auto one = kvasir::ComputeThreads::lend(n, 1), other = kvasir::ComputeThreads::lend(n, 1);
    EXPECT((one == other) == (2 * int64_t(n) > count));
    EXPECT(one->pool() != nullptr);
    EXPECT(kvasir::ComputeThreads::lend(n, 0) != one);  // they spin for another time
}

TEST(shared_threads_serve_one_context_at_a_time) {
    const auto threads = kvasir::ComputeThreads::lend(2, 1);
    std::atomic<int> inside{0}, most{0};
    std::vector<std::thread> users;
    for (int t = 0; t < 4; ++t) {
        users.emplace_back([&] {
            for (int i = 0; i < 200; ++i) {
                const kvasir::ComputeTurn turn(threads.get(), 1);
                const int now = ++inside;
                for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
                }
                --inside;
            }
        });
    }
    for (std::thread &user : users) user.join();
    EXPECT(most == 1);
}

TEST(a_decode_waits_for_cores_that_are_lent) {
    auto model = test::load();
    auto ctx = test::context(*model);
    kvasir::Cores &cores = kvasir::Cores::of_process();
    auto lease = std::make_unique<kvasir::CoreLease>(cores, cores.count());
    auto fed = std::async(std::launch::async, [&] { return test::feed(*ctx, 0, {97, 98}); });
    EXPECT(fed.wait_for(std::chrono::milliseconds(200)) == std::future_status::timeout);
    lease.reset();
    EXPECT(fed.get());
}
