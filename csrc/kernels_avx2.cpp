// AVX2: eight lanes, even words of a vector in one set of accumulators and odd words in the other.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline

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

AVX2 void add(WeightedLanes& sums, const Lanes& run, const Gap& words_after) { add_lanes<8>(sums, run, words_after); }

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

AVX2 void f16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  size_t i = 0;
  for (; i + 8 <= num_values; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * i));
    _mm256_storeu_ps(reinterpret_cast<float*>(target + 4 * i), _mm256_cvtph_ps(halves));
  }
  cast_f16_to_f32(source + 2 * i, target + 4 * i, num_values - i);
}

AVX2 void f32_to_f16(const uint8_t* source, uint8_t* target, size_t num_values) {
  size_t i = 0;
  for (; i + 8 <= num_values; i += 8) {
    const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(source + 4 * i));
    const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 2 * i), halves);
  }
  cast_f32_to_f16(source + 4 * i, target + 2 * i, num_values - i);
}

template <size_t kItem>
AVX2_INLINE __m256i unpack_low(__m256i x, __m256i y) {
  switch (kItem) {
    case 1:
      return _mm256_unpacklo_epi8(x, y);
    case 2:
      return _mm256_unpacklo_epi16(x, y);
    case 4:
      return _mm256_unpacklo_epi32(x, y);
    default:
      return _mm256_unpacklo_epi64(x, y);
  }
}

template <size_t kItem>
AVX2_INLINE __m256i unpack_high(__m256i x, __m256i y) {
  switch (kItem) {
    case 1:
      return _mm256_unpackhi_epi8(x, y);
    case 2:
      return _mm256_unpackhi_epi16(x, y);
    case 4:
      return _mm256_unpackhi_epi32(x, y);
    default:
      return _mm256_unpackhi_epi64(x, y);
  }
}

// 16 bytes of a row in the lower half, and of the row `lane_rows` below it in the upper one.
AVX2_INLINE __m256i read_lanes(const uint8_t* row, size_t lane_rows) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + lane_rows));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// A square of 16 bytes a side in each half. Element (row, column) has the number row * n + column; a round of unpacking
// rotates the bits of that number by one, so that log2 n rounds swap row and column.
template <size_t kItem>
AVX2_INLINE void transpose_squares(__m256i (&rows)[16 / kItem]) {
  constexpr size_t kSide = 16 / kItem;
#pragma GCC unroll 4
  for (size_t round = 1; round < kSide; round *= 2) {
    __m256i turned[kSide];
#pragma GCC unroll 8
    for (size_t i = 0; i < kSide / 2; ++i) {
      turned[2 * i] = unpack_low<kItem>(rows[i], rows[i + kSide / 2]);
      turned[2 * i + 1] = unpack_high<kItem>(rows[i], rows[i + kSide / 2]);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kSide; ++i) rows[i] = turned[i];
  }
}

template <size_t kItem>
AVX2 void transpose(const uint8_t* rows, size_t row_stride, uint8_t* target, size_t target_stride, size_t num_columns) {
  constexpr size_t kSide = 16 / kItem;
  for (size_t column = 0; column < num_columns; column += kSide, rows += 16, target += kSide * target_stride) {
    for (size_t half = 0; half < 2; ++half) {
      __m256i square[kSide];
#pragma GCC unroll 16
      for (size_t i = 0; i < kSide; ++i) {
        square[i] = read_lanes(rows + (2 * half * kSide + i) * row_stride, kSide * row_stride);
      }
      transpose_squares<kItem>(square);
#pragma GCC unroll 16
      for (size_t i = 0; i < kSide; ++i) write<Store::cached>(target + i * target_stride + 32 * half, square[i]);
    }
  }
}

}  // namespace

const BlockKernels avx2_kernels = {
    "avx2",
    8,
    sum,
    copy_sum,
    add,
    copy,
    {nullptr, f32_to_bf16, bf16_to_f32, f16_to_f32, f32_to_f16, cast_through_f32<f16_to_f32, f32_to_bf16>,
     cast_through_f32<bf16_to_f32, f32_to_f16>},
    {transpose<1>, transpose<2>, transpose<4>, transpose<8>}};

}  // namespace fastdeploy_rl

#endif
