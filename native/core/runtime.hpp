// What is global in llama.cpp, held in one place: backend start, the log, and the abort callback.
//
// A GGML_ASSERT kills the process. Where no compute threads are involved (loading, context creation, tokenizing,
// building samplers, moving state) an AbortTrap on the stack turns it into an Error instead. It must never cover a
// decode: the other compute threads would wait for the lost one for ever.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace kvasir {

// Starts llama.cpp's backends and takes over its log. Idempotent; every entry point calls it.
void ensure_backend();

// Lines llama.cpp logged since the last call, as (Python logging level, text). Waits up to timeout_s for the first.
std::vector<std::pair<int, std::string>> take_logs(double timeout_s);

// While alive, warnings and errors logged by this thread are also collected here: llama.cpp gives reasons only in its
// log. Warnings count only where no error was logged.
class LogCapture {
  public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture &operator=(const LogCapture &) = delete;

    // The collected lines as one sentence fragment, or `otherwise` when nothing was logged.
    std::string reason(const std::string &otherwise) const;
    void add(const std::string &line, bool is_error);

  private:
    std::string errors_, warnings_;
    LogCapture *outer_;
};

// Runs `work` on this thread; a GGML_ASSERT or GGML_ABORT inside it becomes an Error of this kind.
void with_abort_trap(Kind kind, const std::string &doing, const std::function<void()> &work);

// Runs `work`, a user's callback inside a trap, as if no trap and no capture were there: it may call us again.
void without_abort_trap(const std::function<void()> &work);

}  // namespace kvasir
