#include "quantize.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "gguf_check.hpp"
#include "llama.h"
#include "runtime.hpp"

namespace kvasir {
namespace {

constexpr int32_t MAX_THREADS = 1024;

// Layouts that need an importance matrix (iq1, iq2, iq3_xxs, q2_k_s) are missing: llama.cpp refuses them without one.
const std::vector<std::pair<std::string, llama_ftype>> LAYOUTS = {
    {"f32", LLAMA_FTYPE_ALL_F32},          {"f16", LLAMA_FTYPE_MOSTLY_F16},       {"bf16", LLAMA_FTYPE_MOSTLY_BF16},
    {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},     {"q6_k", LLAMA_FTYPE_MOSTLY_Q6_K},     {"q5_k_m", LLAMA_FTYPE_MOSTLY_Q5_K_M},
    {"q5_k_s", LLAMA_FTYPE_MOSTLY_Q5_K_S}, {"q5_1", LLAMA_FTYPE_MOSTLY_Q5_1},     {"q5_0", LLAMA_FTYPE_MOSTLY_Q5_0},
    {"q4_k_m", LLAMA_FTYPE_MOSTLY_Q4_K_M}, {"q4_k_s", LLAMA_FTYPE_MOSTLY_Q4_K_S}, {"q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
    {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},     {"iq4_nl", LLAMA_FTYPE_MOSTLY_IQ4_NL}, {"iq4_xs", LLAMA_FTYPE_MOSTLY_IQ4_XS},
    {"q3_k_l", LLAMA_FTYPE_MOSTLY_Q3_K_L}, {"q3_k_m", LLAMA_FTYPE_MOSTLY_Q3_K_M}, {"q3_k_s", LLAMA_FTYPE_MOSTLY_Q3_K_S},
    {"q2_k", LLAMA_FTYPE_MOSTLY_Q2_K},
};

llama_ftype layout_of(const std::string &name) {
    std::string known;
    for (const auto &[each, ftype] : LAYOUTS) {
        if (each == name) {
            return ftype;
        }
        known += known.empty() ? each : ", " + each;
    }
    throw Error(Kind::BadOption, "'" + name + "' is no layout to convert to; it is one of " + known + ".");
}

struct Stopped {};  // not a std::exception: the quantizer would catch that and call it a failure

// Reads the quantizer's log on the thread that runs it.
class TensorWatch {
  public:
    explicit TensorWatch(const std::function<bool(float)> &report) : report_(report) {
        install();
        t_watch = this;
    }
    ~TensorWatch() { t_watch = nullptr; }
    TensorWatch(const TensorWatch &) = delete;
    TensorWatch &operator=(const TensorWatch &) = delete;

    // The user's exception, if that is what stopped it.
    void rethrow() const {
        if (thrown_) {
            std::rethrow_exception(thrown_);
        }
    }

  private:
    static thread_local TensorWatch *t_watch;
    static ggml_log_callback s_next;
    static void *s_next_data;

    // Once, and for good: a callback taken out again could be in use by another thread.
    static void install() {
        static const bool installed = [] {
            llama_log_get(&s_next, &s_next_data);
            llama_log_set(on_log, nullptr);
            return true;
        }();
        (void)installed;
    }

    static void on_log(ggml_log_level level, const char *text, void *) {
        s_next(level, text, s_next_data);
        int n_begun = 0, n_tensors = 0;
        if (t_watch && std::sscanf(text, "[%d/%d]", &n_begun, &n_tensors) == 2 && n_tensors > 0) {
            t_watch->tell(static_cast<float>(n_begun - 1) / static_cast<float>(n_tensors));
        }
    }

    // No worker threads run while the quantizer logs, so leaving it by an exception here takes everything down in
    // order.
    void tell(float part) {
        bool go_on = false;
        try {
            without_abort_trap([&] { go_on = report_(part); });
        } catch (...) {
            thrown_ = std::current_exception();
        }
        if (!go_on) {
            s_next(GGML_LOG_LEVEL_CONT, "stopped\n", s_next_data);  // the line was not at its end
            throw Stopped{};
        }
    }

    const std::function<bool(float)> &report_;
    std::exception_ptr thrown_;
};

thread_local TensorWatch *TensorWatch::t_watch = nullptr;
ggml_log_callback TensorWatch::s_next = nullptr;
void *TensorWatch::s_next_data = nullptr;

bool same_file(const std::string &a, const std::string &b) {
    struct stat first{}, second{};
    return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

std::string reason_in(const LogCapture &log, const std::string &dst) {
    const std::string reason = log.reason("llama.cpp gave no reason");
    // A C++ stream that cannot be opened or written says no more than that.
    return reason.find("iostream error") == std::string::npos
               ? reason
               : dst + " could not be written; check its folder and the room on its disk";
}

}  // namespace

void quantize(const std::string &src, const std::string &dst, const QuantizeParams &params) {
    ensure_backend();
    llama_model_quantize_params raw = llama_model_quantize_default_params();
    raw.ftype = layout_of(params.to);
    raw.allow_requantize = true;
    raw.nthread = params.threads;
    if (params.threads < 0 || params.threads > MAX_THREADS) {
        throw Error(Kind::BadOption, "threads is 0 (one per core) to " + std::to_string(MAX_THREADS) + ", not " +
                                         std::to_string(params.threads) + ".");
    }
    if (dst.empty() || dst.find('\0') != std::string::npos) {
        throw Error(Kind::BadOption, "the output must be a path, without NUL bytes.");
    }
    check_gguf(src);
    if (same_file(src, dst)) {
        throw Error(Kind::BadOption, "the output " + dst + " is the model itself; name another file.");
    }

    const std::string doing = "converting " + src + " to " + params.to;
    const std::function<bool(float)> silent = [](float) { return true; };
    LogCapture log;
    uint32_t failed = 0;
    {
        const TensorWatch watch(params.progress ? params.progress : silent);
        try {
            with_abort_trap(Kind::ModelLoadError, doing,
                            [&] { failed = llama_model_quantize(src.c_str(), dst.c_str(), &raw); });
        } catch (const Stopped &) {
            watch.rethrow();
            throw Error(Kind::ModelLoadError, doing + " was stopped by its progress callback.");
        }
    }
    if (failed != 0) {
        throw Error(Kind::ModelLoadError, doing + " failed: " + reason_in(log, dst) + ".");
    }
    // Its stream may lose the last bytes of a full disk in silence; a file shorter than its tensors shows here.
    check_gguf(dst);
    if (params.progress) {
        params.progress(1.0f);
    }
}

}  // namespace kvasir
