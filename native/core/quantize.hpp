// Weights from one layout to another, by llama.cpp's own quantizer.
//
// Writes exactly one file and knows nothing of stores or of which layout is good. A failure leaves an unfinished file
// at `dst`: the caller writes to a temporary name. The quantizer has no callback; its log has a line for each tensor,
// and that is where progress comes from and where a stop takes effect.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace kvasir {

struct QuantizeParams {
    std::string to;                       // a layout's name in lower case: "q8_0"
    int32_t threads = 0;                  // 0: one per core
    std::function<bool(float)> progress;  // returning false stops before the next tensor; exceptions reach the caller
};

void quantize(const std::string &src, const std::string &dst, const QuantizeParams &params);

}  // namespace kvasir
