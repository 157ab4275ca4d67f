// The casts: their names, the sizes of their values, and what they do to a value, in a form that compilers turn into
// vectors for the target of the calling function. All of them round to nearest, ties to even; overflow becomes
// infinity; a NaN keeps its sign and upper payload and is made quiet, so that it cannot round to infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fastdeploy_rl {

enum class Cast { none, f32_to_bf16, bf16_to_f32, f16_to_f32, f32_to_f16, f16_to_bf16, bf16_to_f16 };

struct CastKind {
  const char* name;
  size_t source_value, target_value;  // Bytes of one value.
};

// In the order of `Cast`.
constexpr CastKind kCasts[] = {{"none", 1, 1},    {"F32_BF16", 4, 2}, {"BF16_F32", 2, 4}, {"F16_F32", 2, 4},
                               {"F32_F16", 4, 2}, {"F16_BF16", 2, 2}, {"BF16_F16", 2, 2}};
constexpr size_t kNumCasts = sizeof(kCasts) / sizeof(kCasts[0]);

constexpr const CastKind& kind_of(Cast cast) { return kCasts[static_cast<size_t>(cast)]; }

[[gnu::always_inline]] inline uint16_t bf16_of_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

[[gnu::always_inline]] inline uint32_t f32_of_bf16(uint16_t half) { return static_cast<uint32_t>(half) << 16; }

inline uint32_t f32_of_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 31) return sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // Exact: a float32 has no trouble with these.
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  return sign | bits;
}

// The lowest `shift` bits away, to nearest even.
inline uint32_t rounded_shift(uint32_t value, uint32_t shift) {
  return (value + (1u << (shift - 1)) - 1 + ((value >> shift) & 1u)) >> shift;
}

inline uint16_t f16_of_f32(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 2^16; what lies between the largest F16 and this rounds by carrying over.
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the least normal F16.
    half = rounded_shift(magnitude - 0x38000000u, 13);
  } else if (magnitude >= 0x33000000u) {  // 2^-25, half of the least subnormal F16.
    half = rounded_shift((magnitude & 0x7fffffu) | 0x800000u, 126 - (magnitude >> 23));
  } else {
    half = 0;
  }
  return static_cast<uint16_t>(sign | half);
}

template <typename From, typename To, typename Value>
[[gnu::always_inline]] inline void cast_each(const uint8_t* source, uint8_t* target, size_t num_values, Value value) {
  for (size_t i = 0; i < num_values; ++i) {
    From from;
    std::memcpy(&from, source + sizeof(From) * i, sizeof(From));
    const To to = value(from);
    std::memcpy(target + sizeof(To) * i, &to, sizeof(To));
  }
}

[[gnu::always_inline]] inline void cast_f32_to_bf16(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_each<uint32_t, uint16_t>(source, target, num_values, [](uint32_t bits) { return bf16_of_f32(bits); });
}

[[gnu::always_inline]] inline void cast_bf16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_each<uint16_t, uint32_t>(source, target, num_values, [](uint16_t half) { return f32_of_bf16(half); });
}

[[gnu::always_inline]] inline void cast_f16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_each<uint16_t, uint32_t>(source, target, num_values, [](uint16_t half) { return f32_of_f16(half); });
}

[[gnu::always_inline]] inline void cast_f32_to_f16(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_each<uint32_t, uint16_t>(source, target, num_values, [](uint32_t bits) { return f16_of_f32(bits); });
}

using CastFunction = void (*)(const uint8_t* source, uint8_t* target, size_t num_values);

// From one half to the other: every half is a float32, so that only the second step rounds.
template <CastFunction widen, CastFunction narrow>
void cast_through_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  constexpr size_t kBlockValues = 1024;
  alignas(64) uint8_t wide[4 * kBlockValues];
  for (size_t done = 0; done < num_values; done += kBlockValues) {
    const size_t count = num_values - done < kBlockValues ? num_values - done : kBlockValues;
    widen(source + 2 * done, wide, count);
    narrow(wide, target + 2 * done, count);
  }
}

}  // namespace fastdeploy_rl
