#include "runtime.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>

#include "ggml.h"
#include "llama.h"
#include "llama/attention.h"
#include "log.h"

namespace kvasir {
namespace {

constexpr size_t MAX_QUEUED_LINES = 4096;  // a consumer that stopped reading must not eat the heap
constexpr double MAX_WAIT_S = 3600.0;      // an endless wait overflows the clock

struct AbortCaught {
    std::string message;
};

thread_local LogCapture *t_capture = nullptr;
thread_local bool t_trap = false;
thread_local std::string t_line;  // llama.cpp logs pieces of lines

struct LogQueue {
    std::mutex mutex;
    std::condition_variable ready;
    std::deque<std::pair<int, std::string>> lines;
    size_t n_dropped = 0;

    void push(int level, std::string line) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            if (lines.size() >= MAX_QUEUED_LINES) {
                lines.pop_front();
                ++n_dropped;
            }
            lines.emplace_back(level, std::move(line));
        }
        ready.notify_one();
    }
};

// Leaked on purpose: backend threads may log while the process is ending.
LogQueue &queue() {
    static LogQueue *q = new LogQueue;
    return *q;
}

int python_level(ggml_log_level level) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR:
            return 40;
        case GGML_LOG_LEVEL_WARN:
            return 30;
        case GGML_LOG_LEVEL_INFO:
            return 20;
        default:
            return 10;
    }
}

void on_log(ggml_log_level level, const char *text, void *) {
    thread_local ggml_log_level t_level = GGML_LOG_LEVEL_DEBUG;
    if (level != GGML_LOG_LEVEL_CONT) {
        t_level = level;
    }
    t_line += text;
    size_t end;
    while ((end = t_line.find('\n')) != std::string::npos) {
        std::string line = t_line.substr(0, end);
        t_line.erase(0, end + 1);
        if (line.empty()) {
            continue;
        }
        if (t_capture && t_level >= GGML_LOG_LEVEL_WARN && t_level != GGML_LOG_LEVEL_CONT) {
            t_capture->add(line, t_level == GGML_LOG_LEVEL_ERROR);
        }
        queue().push(python_level(t_level), std::move(line));
    }
}

void on_abort(const char *message) {
    if (t_trap) {
        t_trap = false;
        throw AbortCaught{message};
    }
    std::fprintf(stderr, "llama.cpp aborted: %s\n", message);
}

}  // namespace

void ensure_backend() {
    static const bool started = [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        // llama-common logs through a singleton of its own, straight to stdout and stderr.
        common_log_set_verbosity_thold(-1);
        common_log_pause(common_log_main());
        llama_backend_init();
        kvasir_use_attention();
        return true;
    }();
    (void)started;
}

std::vector<std::pair<int, std::string>> take_logs(double timeout_s) {
    LogQueue &q = queue();
    std::unique_lock<std::mutex> lock(q.mutex);
    const double wait_s = timeout_s > 0.0 ? std::min(timeout_s, MAX_WAIT_S) : 0.0;  // not a number: do not wait
    q.ready.wait_for(lock, std::chrono::duration<double>(wait_s), [&] { return !q.lines.empty(); });
    std::vector<std::pair<int, std::string>> out(q.lines.begin(), q.lines.end());
    q.lines.clear();
    if (q.n_dropped > 0) {
        out.emplace_back(30, std::to_string(q.n_dropped) + " earlier log lines were dropped: nobody read them in time");
        q.n_dropped = 0;
    }
    return out;
}

LogCapture::LogCapture() : outer_(t_capture) { t_capture = this; }
LogCapture::~LogCapture() { t_capture = outer_; }

void LogCapture::add(const std::string &line, bool is_error) {
    std::string &text = is_error ? errors_ : warnings_;
    if (text.size() > 2000) {
        return;
    }
    // "llama_model_load: error loading model: x" -> "error loading model: x"
    size_t start = 0;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && line.find(' ') == colon + 1) {
        start = colon + 2;
    }
    if (!text.empty()) {
        text += "; ";
    }
    text += line.substr(start);
}

std::string LogCapture::reason(const std::string &otherwise) const {
    return !errors_.empty() ? errors_ : !warnings_.empty() ? warnings_ : otherwise;
}

void with_abort_trap(Kind kind, const std::string &doing, const std::function<void()> &work) {
    const bool outer = t_trap;
    t_trap = true;
    try {
        work();
        t_trap = outer;
    } catch (const AbortCaught &caught) {
        t_trap = outer;
        throw Error(kind, doing + ": llama.cpp refused with an assertion, " + caught.message);
    } catch (...) {
        t_trap = outer;
        throw;
    }
}

void without_abort_trap(const std::function<void()> &work) {
    struct Restore {
        bool trap;
        LogCapture *capture;
        ~Restore() {
            t_trap = trap;
            t_capture = capture;
        }
    } const restore{t_trap, t_capture};
    t_trap = false;
    t_capture = nullptr;
    work();
}

}  // namespace kvasir
