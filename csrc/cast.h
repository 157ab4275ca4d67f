// F32 <-> BF16, value by value, in a form that compilers turn into vectors for the target of the calling function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fastdeploy_rl {

// Round to nearest, ties to even. NaN keeps its sign and upper payload and is made quiet, so that it cannot round to
// infinity.
[[gnu::always_inline]] inline void cast_f32_to_bf16(const uint8_t* source, uint8_t* target, size_t num_values) {
  for (size_t i = 0; i < num_values; ++i) {
    uint32_t bits;
    std::memcpy(&bits, source + 4 * i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    const auto value = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    std::memcpy(target + 2 * i, &value, 2);
  }
}

[[gnu::always_inline]] inline void cast_bf16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  for (size_t i = 0; i < num_values; ++i) {
    uint16_t half;
    std::memcpy(&half, source + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(target + 4 * i, &bits, 4);
  }
}

}  // namespace fastdeploy_rl
