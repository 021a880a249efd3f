#include "pool.hpp"

#include <utility>

namespace kvasir {

Pool::Pool(size_t n_threads) {
    try {
        for (size_t i = 1; i < n_threads; ++i) {
            threads_.emplace_back([this] { serve(); });
        }
    } catch (...) {  // the system has no more threads; those that run must end before their handles do
        join();
        throw;
    }
}

Pool::~Pool() { join(); }

void Pool::join() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) {
        thread.join();
    }
}

// Takes items until none is left. The lock is held only between items, which take tens of microseconds each.
void Pool::drain(std::unique_lock<std::mutex> &lock) {
    while (next_ < n_) {
        const size_t i = next_++;
        ++n_running_;
        lock.unlock();
        std::exception_ptr thrown;
        try {
            (*work_)(i);
        } catch (...) {
            thrown = std::current_exception();
        }
        lock.lock();
        --n_running_;
        if (thrown && !thrown_) thrown_ = thrown;
    }
}

void Pool::each(size_t n, const std::function<void(size_t)> &work) {
    if (n == 1) {
        work(0);
        return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = &work;
    next_ = 0;
    n_ = n;
    wake_.notify_all();
    drain(lock);
    done_.wait(lock, [&] { return n_running_ == 0; });
    n_ = 0;
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
}

void Pool::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        wake_.wait(lock, [&] { return stop_ || next_ < n_; });
        if (stop_) return;
        drain(lock);
        if (n_running_ == 0) done_.notify_all();
    }
}

}  // namespace kvasir
