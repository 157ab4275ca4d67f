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

// The sums once `num_words` zero words follow.
Sums shift(const Sums& sums, uint64_t num_words);

// `first` followed by `second`, which has `num_words_second` words.
Sums append(const Sums& first, const Sums& second, uint64_t num_words_second);

// Word i went into lane i % num_lanes, and each lane ran its own fletcher4 (Lanes::a[lane] and so on): the sums of the
// words in their order. num_lanes is 8 or 16.
struct Lanes {
  alignas(64) uint64_t a[16], b[16], c[16], d[16];
};
Sums combine_8_lanes(const Lanes& lanes);
Sums combine_16_lanes(const Lanes& lanes);

}  // namespace fastdeploy_rl
