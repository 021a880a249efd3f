// A few threads that run one loop in parallel; the caller takes part. Used for sampling rows after a decode.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvasir {

class Pool {
  public:
    explicit Pool(size_t n_threads);  // the caller included
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // Runs work(0) .. work(n-1), each once, and returns when all have; then throws the first exception, if any. One
    // caller at a time.
    void each(size_t n, const std::function<void(size_t)> &work);

  private:
    void serve();
    void join();
    void drain(std::unique_lock<std::mutex> &lock);

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(size_t)> *work_ = nullptr;
    size_t next_ = 0, n_ = 0, n_running_ = 0;
    std::exception_ptr thrown_;
    bool stop_ = false;
};

}  // namespace kvasir
