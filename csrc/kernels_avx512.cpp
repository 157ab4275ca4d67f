// AVX-512: sixteen lanes, even words of a vector in one set of accumulators and odd words in the other.
#include "kernels.h"

#if defined(__x86_64__)

// GCC 12 takes the undefined pass-through operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <immintrin.h>

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

AVX512 void add(WeightedLanes& sums, const Lanes& run, const Gap& words_after) {
  add_lanes<16>(sums, run, words_after);
}

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

AVX512 void f16_to_f32(const uint8_t* source, uint8_t* target, size_t num_values) {
  size_t i = 0;
  for (; i + 16 <= num_values; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 2 * i));
    _mm512_storeu_ps(target + 4 * i, _mm512_cvtph_ps(halves));
  }
  cast_f16_to_f32(source + 2 * i, target + 4 * i, num_values - i);
}

AVX512 void f32_to_f16(const uint8_t* source, uint8_t* target, size_t num_values) {
  size_t i = 0;
  for (; i + 16 <= num_values; i += 16) {
    const __m512 values = _mm512_loadu_ps(source + 4 * i);
    const __m256i halves = _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 2 * i), halves);
  }
  cast_f32_to_f16(source + 4 * i, target + 2 * i, num_values - i);
}

template <size_t kItem>
AVX512_INLINE __m512i unpack_low(__m512i x, __m512i y) {
  switch (kItem) {
    case 1:
      return _mm512_unpacklo_epi8(x, y);
    case 2:
      return _mm512_unpacklo_epi16(x, y);
    case 4:
      return _mm512_unpacklo_epi32(x, y);
    default:
      return _mm512_unpacklo_epi64(x, y);
  }
}

template <size_t kItem>
AVX512_INLINE __m512i unpack_high(__m512i x, __m512i y) {
  switch (kItem) {
    case 1:
      return _mm512_unpackhi_epi8(x, y);
    case 2:
      return _mm512_unpackhi_epi16(x, y);
    case 4:
      return _mm512_unpackhi_epi32(x, y);
    default:
      return _mm512_unpackhi_epi64(x, y);
  }
}

AVX512_INLINE __m128i read_lane(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// 16 bytes of a row and of those 1, 2 and 3 times `lane_rows` below it.
AVX512_INLINE __m512i read_lanes(const uint8_t* row, size_t lane_rows) {
  __m512i lanes = _mm512_castsi128_si512(read_lane(row));
  lanes = _mm512_inserti32x4(lanes, read_lane(row + lane_rows), 1);
  lanes = _mm512_inserti32x4(lanes, read_lane(row + 2 * lane_rows), 2);
  return _mm512_inserti32x4(lanes, read_lane(row + 3 * lane_rows), 3);
}

// A square of 16 bytes a side in each of four lanes. Element (row, column) has the number row * n + column; a round of
// unpacking rotates the bits of that number by one, so that log2 n rounds swap row and column.
template <size_t kItem>
AVX512_INLINE void transpose_squares(__m512i (&rows)[16 / kItem]) {
  constexpr size_t kSide = 16 / kItem;
#pragma GCC unroll 4
  for (size_t round = 1; round < kSide; round *= 2) {
    __m512i turned[kSide];
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
AVX512 void transpose(const uint8_t* rows, size_t row_stride, uint8_t* target, size_t target_stride,
                      size_t num_columns) {
  constexpr size_t kSide = 16 / kItem;
  for (size_t column = 0; column < num_columns; column += kSide, rows += 16, target += kSide * target_stride) {
    __m512i square[kSide];
#pragma GCC unroll 16
    for (size_t i = 0; i < kSide; ++i) square[i] = read_lanes(rows + i * row_stride, kSide * row_stride);
    transpose_squares<kItem>(square);
#pragma GCC unroll 16
    for (size_t i = 0; i < kSide; ++i) write<Store::cached>(target + i * target_stride, square[i]);
  }
}

}  // namespace

const BlockKernels avx512_kernels = {
    "avx512",
    16,
    sum,
    copy_sum,
    add,
    copy,
    {nullptr, f32_to_bf16, bf16_to_f32, f16_to_f32, f32_to_f16, cast_through_f32<f16_to_f32, f32_to_bf16>,
     cast_through_f32<bf16_to_f32, f32_to_f16>},
    {transpose<1>, transpose<2>, transpose<4>, transpose<8>}};

}  // namespace fastdeploy_rl

#endif
