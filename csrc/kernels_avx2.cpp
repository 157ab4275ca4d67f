// AVX2: eight lanes, even words of a vector in one set of accumulators and odd words in the other.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "cast.h"

#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace fastdeploy_rl {

namespace {

struct Accumulators {
  __m256i a, b, c, d;
};

AVX2_INLINE void step(Accumulators& acc, __m256i words) {
  acc.a = _mm256_add_epi64(acc.a, words);
  acc.b = _mm256_add_epi64(acc.b, acc.a);
  acc.c = _mm256_add_epi64(acc.c, acc.b);
  acc.d = _mm256_add_epi64(acc.d, acc.c);
}

AVX2_INLINE void feed(Accumulators& even, Accumulators& odd, __m256i vector) {
  step(even, _mm256_and_si256(vector, _mm256_set1_epi64x(0xffffffff)));
  step(odd, _mm256_srli_epi64(vector, 32));
}

// Lanes 0, 2, 4, 6 are in `even`, lanes 1, 3, 5, 7 in `odd`.
AVX2_INLINE void interleave(__m256i even, __m256i odd, uint64_t* lanes) {
  const __m256i low = _mm256_unpacklo_epi64(even, odd), high = _mm256_unpackhi_epi64(even, odd);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 4), _mm256_permute2x128_si256(low, high, 0x31));
}

AVX2_INLINE void finish(const Accumulators& even, const Accumulators& odd, Lanes& lanes) {
  interleave(even.a, odd.a, lanes.a);
  interleave(even.b, odd.b, lanes.b);
  interleave(even.c, odd.c, lanes.c);
  interleave(even.d, odd.d, lanes.d);
}

AVX2_INLINE __m256i read(const uint8_t* source) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)); }

template <Store kStore>
AVX2_INLINE void write(uint8_t* target, __m256i vector) {
  if (kStore == Store::streamed) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), vector);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), vector);
  }
}

AVX2 void sum(const uint8_t* source, size_t num_blocks, Lanes& lanes) {
  Accumulators even{}, odd{};
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes) {
    feed(even, odd, read(source));
    feed(even, odd, read(source + 32));
  }
  finish(even, odd, lanes);
}

template <Store kStore>
AVX2 void copy_sum_as(const uint8_t* source, uint8_t* target, size_t num_blocks, Lanes& lanes) {
  Accumulators even{}, odd{};
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes, target += kBlockBytes) {
    const __m256i first = read(source), second = read(source + 32);
    write<kStore>(target, first);
    write<kStore>(target + 32, second);
    feed(even, odd, first);
    feed(even, odd, second);
  }
  finish(even, odd, lanes);
}

void copy_sum(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store, Lanes& lanes) {
  const auto run = store == Store::streamed ? copy_sum_as<Store::streamed> : copy_sum_as<Store::cached>;
  run(source, target, num_blocks, lanes);
}

AVX2 void append(Lanes& sums, const Gap& gap, const Lanes& next) { append_lanes<8>(sums, gap, next); }

AVX2 void copy(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store) {
  if (store == Store::cached) {
    std::memcpy(target, source, num_blocks * kBlockBytes);
    return;
  }
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes, target += kBlockBytes) {
    const __m256i first = read(source), second = read(source + 32);
    write<Store::streamed>(target, first);
    write<Store::streamed>(target + 32, second);
  }
}

AVX2 void f32_to_bf16(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f32_to_bf16(source, target, num_values);
}

AVX2 void bf16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_bf16_to_f32(source, target, num_values);
}

}  // namespace

const BlockKernels avx2_kernels = {"avx2", 8, sum, copy_sum, append, copy, f32_to_bf16, bf16_to_f32};

}  // namespace fastdeploy_rl

#endif
