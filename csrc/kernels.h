// The inner loops: sum, copy, copy + sum, cast; chosen once for the processor we run on.
// They work on plain pointers of any alignment; nobody checks bounds below this line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fletcher.h"

namespace fastdeploy_rl {

// Streamed stores go around the caches: right for more bytes than the caches hold, wrong for fewer.
enum class Store { cached, streamed };

// What one instruction set offers, over blocks of 64 bytes. A streamed store needs a 64-byte aligned target.
constexpr size_t kBlockBytes = 64;
struct BlockKernels {
  const char* level;
  int num_lanes;
  void (*sum)(const uint8_t* source, size_t num_blocks, Lanes& lanes);
  void (*copy_sum)(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store, Lanes& lanes);
  void (*append)(Lanes& sums, const Gap& gap, const Lanes& next);
  void (*copy)(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store);
  void (*f32_to_bf16)(const uint8_t* source, uint8_t* target, size_t num_values);
  void (*bf16_to_f32)(const uint8_t* source, uint8_t* target, size_t num_values);
};

extern const BlockKernels scalar_kernels;
#if defined(__x86_64__)
extern const BlockKernels avx2_kernels;
extern const BlockKernels avx512_kernels;
#endif

// The best level of this machine, or the one last named to `use_kernels`.
const BlockKernels& kernels();

// Takes another level ("scalar", "avx2", "avx512"); std::invalid_argument where this machine lacks it.
void use_kernels(const std::string& level);

// fletcher4 over whole words, any count.
Sums sum_words(const uint8_t* source, size_t num_words);
Sums copy_sum_words(const uint8_t* source, uint8_t* target, size_t num_words, Store store);
void copy_bytes(const uint8_t* source, uint8_t* target, size_t num_bytes, Store store);

// Makes this thread's streamed stores visible before what it stores next.
void store_fence();

}  // namespace fastdeploy_rl
