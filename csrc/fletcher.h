// fletcher4 over little-endian 32-bit words, as an algebra: sums of runs can be shifted and added.
//
// Words w_1 .. w_n, k = n - i + 1: A = sum w, B = sum k w, C = sum k(k+1)/2 w, D = sum k(k+1)(k+2)/6 w, mod 2^64.
// All four are linear in the words, so a tensor's sums are the sums of its regions, each with zeros everywhere else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastdeploy_rl {

constexpr size_t kWordBytes = 4;

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

// Of one job: the bytes as they were read, and as they were written.
struct JobSums {
  Sums read, live;

  JobSums& operator+=(const JobSums& other) {
    read += other.read;
    live += other.live;
    return *this;
  }
};

// What it takes to let z zero words follow: z, z(z+1)/2 and z(z+1)(z+2)/6 mod 2^64, exact for every z below 2^64 - 2.
struct Gap {
  uint64_t z, t2, t3;

  explicit Gap(uint64_t num_words);
};

// The sums once the words of the gap, all zero, follow.
Sums shift(const Sums& sums, const Gap& gap);
inline Sums shift(const Sums& sums, uint64_t num_words) { return shift(sums, Gap(num_words)); }

// Word i went into lane i % num_lanes, and each lane ran its own fletcher4: lane l has the sums a[l], b[l], c[l], d[l].
constexpr int kMaxLanes = 16;
struct Lanes {
  alignas(64) uint64_t a[kMaxLanes], b[kMaxLanes], c[kMaxLanes], d[kMaxLanes];
};

// The sums of the words in their order. num_lanes is 1, 8 or 16.
Sums combine(const Lanes& lanes, int num_lanes);

// The sums of many runs, each with its own number of words after it, kept as lanes and combined once. Shifting is
// linear: it weighs the sums of a run with the z, T2(z) and T3(z) of its gap, so lanes that were weighed can be added
// first.
struct WeightedLanes {
  Lanes plain{}, by_z{}, by_t2{}, by_t3{};
};

// Compilers turn it into vectors for the target of the calling function.
template <int kNumLanes>
[[gnu::always_inline]] inline void add_lanes(WeightedLanes& sums, const Lanes& run, const Gap& words_after) {
  for (int lane = 0; lane < kNumLanes; ++lane) {
    const uint64_t a = run.a[lane], b = run.b[lane], c = run.c[lane];
    sums.plain.a[lane] += a;
    sums.plain.b[lane] += b;
    sums.plain.c[lane] += c;
    sums.plain.d[lane] += run.d[lane];
    sums.by_z.a[lane] += words_after.z * a;
    sums.by_z.b[lane] += words_after.z * b;
    sums.by_z.c[lane] += words_after.z * c;
    sums.by_t2.a[lane] += words_after.t2 * a;
    sums.by_t2.b[lane] += words_after.t2 * b;
    sums.by_t3.a[lane] += words_after.t3 * a;
  }
}

// What the shifted sums of the runs add up to.
Sums combine(const WeightedLanes& lanes, int num_lanes);

}  // namespace fastdeploy_rl
