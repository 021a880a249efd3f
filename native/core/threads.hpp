// Compute threads: ggml's thread pools, one for all contexts that could not compute at once anyway.
//
// A pool's threads spin for a while after a graph, so that the next one starts at once. Where several contexts each had
// a pool of every core, the idle ones would spin on the cores that the busy one was lent, and its barriers would wait
// for the scheduler: on two busy cores that took 36 s instead of 3 for the same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "cores.hpp"

struct ggml_threadpool;

namespace kvasir {

class ComputeThreads {
  public:
    ComputeThreads(int32_t n, uint32_t poll);
    ~ComputeThreads();
    ComputeThreads(const ComputeThreads &) = delete;
    ComputeThreads &operator=(const ComputeThreads &) = delete;

    // Shared where two such pools would not fit the process's cores; else the caller's own.
    static std::shared_ptr<ComputeThreads> lend(int32_t n, uint32_t poll);

    ggml_threadpool *pool() const { return pool_; }
    std::mutex &busy() { return busy_; }

  private:
    ggml_threadpool *pool_;
    std::mutex busy_;
};

// The right to compute, for the length of a scope: so many cores, and the threads that run on them.
class ComputeTurn {
  public:
    ComputeTurn(ComputeThreads *threads, int32_t n) : cores_(Cores::of_process(), n) {
        if (threads) busy_ = std::unique_lock<std::mutex>(threads->busy());
    }

  private:
    CoreLease cores_;
    std::unique_lock<std::mutex> busy_;
};

}  // namespace kvasir
