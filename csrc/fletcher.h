// fletcher4 over little-endian 32-bit words, as an algebra: sums of runs can be shifted, appended and added.
//
// Words w_1 .. w_n, k = n - i + 1: A = sum w, B = sum k w, C = sum k(k+1)/2 w, D = sum k(k+1)(k+2)/6 w, mod 2^64.
// All four are linear in the words, so a tensor's sums are the sums of its regions, each with zeros everywhere else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastdeploy_rl {

struct Sums {
  uint64_t a = 0, b = 0, c = 0, d = 0;

  Sums& operator+=(const Sums& other) {
    a += other.a;
    b += other.b;
    c += other.c;
    d += other.d;
    return *this;
  }

  void add_word(uint64_t word) {
    a += word;
    b += a;
    c += b;
    d += c;
  }
};

// What it takes to let z zero words follow: z, z(z+1)/2 and z(z+1)(z+2)/6 mod 2^64, exact for every z.
struct Gap {
  uint64_t z, t2, t3;

  explicit Gap(uint64_t num_words);
};

// The sums once the words of the gap, all zero, follow.
Sums shift(const Sums& sums, const Gap& gap);
inline Sums shift(const Sums& sums, uint64_t num_words) { return shift(sums, Gap(num_words)); }

// `first` followed by `second`, which has `num_words_second` words.
Sums append(const Sums& first, const Sums& second, uint64_t num_words_second);

// Word i went into lane i % num_lanes, and each lane ran its own fletcher4: lane l has the sums a[l], b[l], c[l], d[l].
constexpr int kMaxLanes = 16;
struct Lanes {
  alignas(64) uint64_t a[kMaxLanes], b[kMaxLanes], c[kMaxLanes], d[kMaxLanes];
};

// The sums of the words in their order. num_lanes is 1, 8 or 16.
Sums combine(const Lanes& lanes, int num_lanes);

// Each lane of `sums`, a gap counted in words of a lane, and then the lane of `next`. Compilers turn it into vectors
// for the target of the calling function.
template <int kNumLanes>
[[gnu::always_inline]] inline void append_lanes(Lanes& sums, const Gap& gap, const Lanes& next) {
  for (int lane = 0; lane < kNumLanes; ++lane) {
    const uint64_t a = sums.a[lane], b = sums.b[lane], c = sums.c[lane];
    sums.d[lane] += gap.z * c + gap.t2 * b + gap.t3 * a + next.d[lane];
    sums.c[lane] += gap.z * b + gap.t2 * a + next.c[lane];
    sums.b[lane] += gap.z * a + next.b[lane];
    sums.a[lane] += next.a[lane];
  }
}

}  // namespace fastdeploy_rl
