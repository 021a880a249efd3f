// The process's cores, lent to one decode at a time as far as they reach.
//
// ggml's threads spin at barriers, so two contexts that compute at once on the same cores take far longer than one
// after the other. Every decode borrows as many cores as it has threads, first come, first served.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace kvasir {

class Cores {
  public:
    explicit Cores(int32_t n) : n_(n), n_free_(n) {}
    static Cores &of_process();  // those this process may run on; without limit where a GPU computes

    void take(int32_t n);  // waits; asks for no more than there are
    void give(int32_t n);
    int32_t count() const { return n_; }

  private:
    int32_t clamped(int32_t n) const;

    const int32_t n_;
    int32_t n_free_;
    uint64_t next_ticket_ = 0, now_serving_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
};

// Cores borrowed for the length of a scope.
class CoreLease {
  public:
    CoreLease(Cores &cores, int32_t n) : cores_(cores), n_(n) { cores_.take(n_); }
    ~CoreLease() { cores_.give(n_); }
    CoreLease(const CoreLease &) = delete;
    CoreLease &operator=(const CoreLease &) = delete;

  private:
    Cores &cores_;
    const int32_t n_;
};

}  // namespace kvasir
