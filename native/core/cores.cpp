#include "cores.hpp"

#include <algorithm>
#include <limits>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

#include "ggml-backend.h"

namespace kvasir {
namespace {

int32_t cores_allowed() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return std::max(1, CPU_COUNT(&set));
    }
#endif
    return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

bool a_gpu_computes() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
        if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) return true;
    }
    return false;
}

}  // namespace

Cores &Cores::of_process() {
    static Cores *cores = new Cores(a_gpu_computes() ? std::numeric_limits<int32_t>::max() : cores_allowed());
    return *cores;
}

int32_t Cores::clamped(int32_t n) const { return std::clamp(n, 1, n_); }

void Cores::take(int32_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    changed_.wait(lock, [&] { return now_serving_ == ticket && n_free_ >= clamped(n); });
    n_free_ -= clamped(n);
    ++now_serving_;
    changed_.notify_all();
}

void Cores::give(int32_t n) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_free_ += clamped(n);
    }
    changed_.notify_all();
}

}  // namespace kvasir
