#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdeploy_rl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as the machine has them");

constexpr size_t kBlockWords = kBlockBytes / kWordBytes;

Sums sum_scalar(const uint8_t* source, size_t num_words) {
  Sums sums;
  for (size_t i = 0; i < num_words; ++i) {
    uint32_t word;
    std::memcpy(&word, source + kWordBytes * i, kWordBytes);
    sums.add_word(word);
  }
  return sums;
}

void put_in_one_lane(const Sums& sums, Lanes& lanes) {
  lanes.a[0] = sums.a;
  lanes.b[0] = sums.b;
  lanes.c[0] = sums.c;
  lanes.d[0] = sums.d;
}

void sum_blocks_scalar(const uint8_t* source, size_t num_blocks, Lanes& lanes) {
  put_in_one_lane(sum_scalar(source, num_blocks * kBlockWords), lanes);
}

// Block by block, so that what is summed is still in the nearest cache.
void copy_sum_blocks_scalar(const uint8_t* source, uint8_t* target, size_t num_blocks, Store, Lanes& lanes) {
  Sums sums;
  for (size_t block = 0; block < num_blocks; ++block, source += kBlockBytes, target += kBlockBytes) {
    for (size_t i = 0; i < kBlockWords; ++i) {
      uint32_t word;
      std::memcpy(&word, source + kWordBytes * i, kWordBytes);
      sums.add_word(word);
    }
    std::memcpy(target, source, kBlockBytes);
  }
  put_in_one_lane(sums, lanes);
}

void add_scalar(WeightedLanes& sums, const Lanes& run, const Gap& words_after) { add_lanes<1>(sums, run, words_after); }

void copy_blocks_scalar(const uint8_t* source, uint8_t* target, size_t num_blocks, Store) {
  std::memcpy(target, source, num_blocks * kBlockBytes);
}

void f32_to_bf16_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f32_to_bf16(source, target, num_values);
}

void bf16_to_f32_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_bf16_to_f32(source, target, num_values);
}

void f16_to_f32_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f16_to_f32(source, target, num_values);
}

void f32_to_f16_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f32_to_f16(source, target, num_values);
}

template <typename Item>
void transpose_scalar(const uint8_t* rows, size_t row_stride, uint8_t* target, size_t target_stride,
                      size_t num_columns) {
  for (size_t column = 0; column < num_columns; ++column, target += target_stride) {
    for (size_t row = 0; row < kBlockBytes / sizeof(Item); ++row) {
      std::memcpy(target + row * sizeof(Item), rows + row * row_stride + column * sizeof(Item), sizeof(Item));
    }
  }
}

bool runs_here(const BlockKernels& candidate) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&candidate == &avx512_kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (&candidate == &avx2_kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
  return &candidate == &scalar_kernels;
}

// Best first.
#if defined(__x86_64__)
const BlockKernels* const kCandidates[] = {&avx512_kernels, &avx2_kernels, &scalar_kernels};
#else
const BlockKernels* const kCandidates[] = {&scalar_kernels};
#endif

const BlockKernels* best() {
  return *std::find_if(std::begin(kCandidates), std::end(kCandidates),
                       [](const BlockKernels* k) { return runs_here(*k); });
}

std::atomic<const BlockKernels*>& choice_of_kernels() {
  static std::atomic<const BlockKernels*> choice{best()};
  return choice;
}

}  // namespace

const BlockKernels scalar_kernels = {
    "scalar",
    1,
    sum_blocks_scalar,
    copy_sum_blocks_scalar,
    add_scalar,
    copy_blocks_scalar,
    {nullptr, f32_to_bf16_scalar, bf16_to_f32_scalar, f16_to_f32_scalar, f32_to_f16_scalar,
     cast_through_f32<f16_to_f32_scalar, f32_to_bf16_scalar>, cast_through_f32<bf16_to_f32_scalar, f32_to_f16_scalar>},
    {transpose_scalar<uint8_t>, transpose_scalar<uint16_t>, transpose_scalar<uint32_t>, transpose_scalar<uint64_t>}};

const BlockKernels& kernels() { return *choice_of_kernels().load(std::memory_order_relaxed); }

void use_kernels(const std::string& level) {
  for (const BlockKernels* candidate : kCandidates) {
    if (candidate->level != level || !runs_here(*candidate)) continue;
    choice_of_kernels().store(candidate);
    return;
  }
  throw std::invalid_argument("no kernels of level '" + level + "' on this machine");
}

size_t bytes_to_boundary(const uint8_t* target) {
  return (kBlockBytes - reinterpret_cast<uintptr_t>(target) % kBlockBytes) % kBlockBytes;
}

void copy_bytes(const uint8_t* source, uint8_t* target, size_t num_bytes, Store store) {
  if (store == Store::cached || num_bytes < 2 * kBlockBytes) {
    std::memcpy(target, source, num_bytes);
    return;
  }
  const size_t head = bytes_to_boundary(target);
  std::memcpy(target, source, head);
  const size_t num_blocks = (num_bytes - head) / kBlockBytes, done = head + num_blocks * kBlockBytes;
  kernels().copy(source + head, target + head, num_blocks, store);
  std::memcpy(target + done, source + done, num_bytes - done);
}

void prefetch(const uint8_t* source, size_t num_bytes) {
  for (size_t done = 0; done < num_bytes; done += kBlockBytes) __builtin_prefetch(source + done);
}

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace fastdeploy_rl
