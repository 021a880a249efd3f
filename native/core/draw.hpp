// Randomness without state: draw i of a request is a function of (seed, i, attempt), so preemption, batch order and
// resuming in another process cannot disturb it. Philox 4x32 with 10 rounds, a counter-based generator.
#pragma once

#include <array>
#include <cstdint>

namespace kvasir {

enum class Purpose : uint32_t { Token = 0, Xtc = 1 };

inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * counter[0];
        const uint64_t b = uint64_t(0xCD9E8D57u) * counter[2];
        counter = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key[1],
                   uint32_t(a)};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return counter;
}

// Uniform in [0, 1) with 53 bits.
inline double draw(uint64_t seed, uint32_t index, uint32_t attempt, Purpose purpose) {
    const auto r = philox({index, attempt, uint32_t(purpose), 0}, {uint32_t(seed), uint32_t(seed >> 32)});
    return double(((uint64_t(r[0]) << 32) | r[1]) >> 11) * 0x1p-53;
}

}  // namespace kvasir
