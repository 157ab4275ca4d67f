#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "cast.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdeploy_rl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as the machine has them");

constexpr size_t kWordBytes = 4;
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

void append_scalar(Lanes& sums, const Gap& gap, const Lanes& next) { append_lanes<1>(sums, gap, next); }

void copy_blocks_scalar(const uint8_t* source, uint8_t* target, size_t num_blocks, Store) {
  std::memcpy(target, source, num_blocks * kBlockBytes);
}

void f32_to_bf16_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_f32_to_bf16(source, target, num_values);
}

void bf16_to_f32_scalar(const uint8_t* source, uint8_t* target, size_t num_values) {
  cast_bf16_to_f32(source, target, num_values);
}

bool runs_here(const BlockKernels& candidate) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&candidate == &avx512_kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (&candidate == &avx2_kernels) return __builtin_cpu_supports("avx2");
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

// Bytes up to the next block boundary of the target; streamed stores start there.
size_t bytes_to_boundary(const uint8_t* target) {
  return (kBlockBytes - reinterpret_cast<uintptr_t>(target) % kBlockBytes) % kBlockBytes;
}

Sums sum_blocks(const uint8_t* source, size_t num_blocks) {
  const BlockKernels& chosen = kernels();
  Lanes lanes;
  chosen.sum(source, num_blocks, lanes);
  return combine(lanes, chosen.num_lanes);
}

Sums copy_sum_blocks(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store) {
  const BlockKernels& chosen = kernels();
  Lanes lanes;
  chosen.copy_sum(source, target, num_blocks, store, lanes);
  return combine(lanes, chosen.num_lanes);
}

Sums copy_sum_few(const uint8_t* source, uint8_t* target, size_t num_words) {
  std::memcpy(target, source, num_words * kWordBytes);
  return sum_scalar(source, num_words);
}

}  // namespace

const BlockKernels scalar_kernels = {"scalar",           1,
                                     sum_blocks_scalar,  copy_sum_blocks_scalar,
                                     append_scalar,      copy_blocks_scalar,
                                     f32_to_bf16_scalar, bf16_to_f32_scalar};

const BlockKernels& kernels() { return *choice_of_kernels().load(std::memory_order_relaxed); }

void use_kernels(const std::string& level) {
  for (const BlockKernels* candidate : kCandidates) {
    if (candidate->level != level || !runs_here(*candidate)) continue;
    choice_of_kernels().store(candidate);
    return;
  }
  throw std::invalid_argument("no kernels of level '" + level + "' on this machine");
}

Sums sum_words(const uint8_t* source, size_t num_words) {
  const size_t num_blocks = num_words / kBlockWords, rest = num_words % kBlockWords;
  const Sums body = num_blocks == 0 ? Sums{} : sum_blocks(source, num_blocks);
  if (rest == 0) return body;
  return append(body, sum_scalar(source + num_blocks * kBlockBytes, rest), rest);
}

Sums copy_sum_words(const uint8_t* source, uint8_t* target, size_t num_words, Store store) {
  size_t head = bytes_to_boundary(target) / kWordBytes;
  if (store == Store::streamed && bytes_to_boundary(target) % kWordBytes != 0) store = Store::cached;
  if (store == Store::cached) head = 0;
  head = std::min(head, num_words);
  Sums sums = copy_sum_few(source, target, head);
  source += head * kWordBytes;
  target += head * kWordBytes;
  const size_t num_blocks = (num_words - head) / kBlockWords, rest = (num_words - head) % kBlockWords;
  if (num_blocks != 0) {
    sums = append(sums, copy_sum_blocks(source, target, num_blocks, store), num_blocks * kBlockWords);
  }
  if (rest == 0) return sums;
  return append(sums, copy_sum_few(source + num_blocks * kBlockBytes, target + num_blocks * kBlockBytes, rest), rest);
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

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace fastdeploy_rl
