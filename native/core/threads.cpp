#include "threads.hpp"

#include <map>
#include <utility>

#include "ggml-cpu.h"

namespace kvasir {

ComputeThreads::ComputeThreads(int32_t n, uint32_t poll) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    params.poll = poll;
    pool_ = ggml_threadpool_new(&params);
}

ComputeThreads::~ComputeThreads() { ggml_threadpool_free(pool_); }

std::shared_ptr<ComputeThreads> ComputeThreads::lend(int32_t n, uint32_t poll) {
    if (2 * int64_t(n) <= Cores::of_process().count()) return std::make_shared<ComputeThreads>(n, poll);
    static std::mutex mutex;
    // Never destroyed: a context may outlive the end of main.
    static auto *shared = new std::map<std::pair<int32_t, uint32_t>, std::weak_ptr<ComputeThreads>>;
    const std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<ComputeThreads> &known = (*shared)[{n, poll}];
    std::shared_ptr<ComputeThreads> threads = known.lock();
    if (!threads) known = threads = std::make_shared<ComputeThreads>(n, poll);
    return threads;
}

}  // namespace kvasir
