// AVX-512: sixteen lanes, even words of a vector in one set of accumulators and odd words in the other.
#include "kernels.h"

#if defined(__x86_64__)

// GCC 12 takes the undefined pass-through operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

#include "cast.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define AVX512_INLINE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), always_inline)) inline

namespace fastdeploy_rl {

namespace {

struct Accumulators {
  __m512i a, b, c, d;
};

AVX512_INLINE void step(Accumulators& acc, __m512i words) {
  acc.a = _mm512_add_epi64(acc.a, words);
  acc.b = _mm512_add_epi64(acc.b, acc.a);
  acc.c = _mm512_add_epi64(acc.c, acc.b);
  acc.d = _mm512_add_epi64(acc.d, acc.c);
}

AVX512_INLINE void feed(Accumulators& even, Accumulators& odd, __m512i vector) {
  step(even, _mm512_and_si512(vector, _mm512_set1_epi64(0xffffffff)));
  step(odd, _mm512_srli_epi64(vector, 32));
}

// Lanes 0, 2 .. 14 are in `even`, lanes 1, 3 .. 15 in `odd`.
AVX512_INLINE void interleave(__m512i even, __m512i odd, uint64_t* lanes) {
  const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_store_si512(lanes, _mm512_permutex2var_epi64(even, first, odd));
  _mm512_store_si512(lanes + 8, _mm512_permutex2var_epi64(even, second, odd));
}

AVX512_INLINE void finish(const Accumulators& even, const Accumulators& odd, Lanes& lanes) {
  interleave(even.a, odd.a, lanes.a);
  interleave(even.b, odd.b, lanes.b);
  interleave(even.c, odd.c, lanes.c);
  interleave(even.d, odd.d, lanes.d);
}

AVX512_INLINE __m512i read(const uint8_t* source) { return _mm512_loadu_si512(source); }

template <Store kStore>
AVX512_INLINE void write(uint8_t* target, __m512i vector) {
  if (kStore == Store::streamed) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), vector);
  } else {
    _mm512_storeu_si512(target, vector);
  }
}

AVX512 void sum(const uint8_t* source, size_t num_blocks, Lanes& lanes) {
  Accumulators even{}, odd{};
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes) feed(even, odd, read(source));
  finish(even, odd, lanes);
}

template <Store kStore>
AVX512 void copy_sum_as(const uint8_t* source, uint8_t* target, size_t num_blocks, Lanes& lanes) {
  Accumulators even{}, odd{};
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes, target += kBlockBytes) {
    const __m512i vector = read(source);
    write<kStore>(target, vector);
    feed(even, odd, vector);
  }
  finish(even, odd, lanes);
}

void copy_sum(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store, Lanes& lanes) {
  const auto run = store == Store::streamed ? copy_sum_as<Store::streamed> : copy_sum_as<Store::cached>;
  run(source, target, num_blocks, lanes);
}

AVX512 void append(Lanes& sums, const Gap& gap, const Lanes& next) { append_lanes<16>(sums, gap, next); }

AVX512 void copy(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store) {
  if (store == Store::cached) {
    std::memcpy(target, source, num_blocks * kBlockBytes);
    return;
  }
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes, target += kBlockBytes) {
    write<Store::streamed>(target, read(source));
  }
}

AVX512 void f32_to_bf16(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f32_to_bf16(source, target, num_values);
}

AVX512 void bf16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_bf16_to_f32(source, target, num_values);
}

}  // namespace

const BlockKernels avx512_kernels = {"avx512", 16, sum, copy_sum, append, copy, f32_to_bf16, bf16_to_f32};

}  // namespace fastdeploy_rl

#endif
