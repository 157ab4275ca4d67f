// The inner loops: sum, copy, copy + sum, cast; chosen once for the processor we run on.
// They work on plain pointers of any alignment; nobody checks bounds below this line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cast.h"
#include "fletcher.h"

namespace fastdeploy_rl {

// Streamed stores go around the caches: right for more bytes than the caches hold, wrong for fewer.
enum class Store { cached, streamed };

constexpr size_t kBlockBytes = 64;

// A group of kBlockBytes / item rows becomes columns: one block of the target per column. All pointers and strides are
// whole blocks; columns are written up to the next 16 bytes of a row.
using TransposeFunction = void (*)(const uint8_t* rows, size_t row_stride, uint8_t* target, size_t target_stride,
                                   size_t num_columns);

// What one instruction set offers, over blocks of 64 bytes. A streamed store needs a 64-byte aligned target.
struct BlockKernels {
  const char* level;
  int num_lanes;
  void (*sum)(const uint8_t* source, size_t num_blocks, Lanes& lanes);
  void (*copy_sum)(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store, Lanes& lanes);
  void (*add)(WeightedLanes& sums, const Lanes& run, const Gap& words_after);
  void (*copy)(const uint8_t* source, uint8_t* target, size_t num_blocks, Store store);
  CastFunction casts[kNumCasts];    // In the order of `Cast`; none for Cast::none.
  TransposeFunction transposes[4];  // Of items of 1, 2, 4 and 8 bytes.

  CastFunction cast(Cast cast) const { return casts[static_cast<size_t>(cast)]; }
  TransposeFunction transpose(size_t item) const { return transposes[item == 8 ? 3 : item / 2]; }
};

extern const BlockKernels scalar_kernels;
#if defined(__x86_64__)
extern const BlockKernels avx2_kernels;
extern const BlockKernels avx512_kernels;
#endif

// The best level of this machine, or the one last named to `use_kernels`.
const BlockKernels& kernels();

// Takes another level ("scalar", "avx2", "avx512"); std::invalid_argument where this machine lacks it. Not while jobs
// run: levels keep their sums in different lanes.
void use_kernels(const std::string& level);

// Bytes up to the next block of the target; streamed stores start there.
size_t bytes_to_boundary(const uint8_t* target);

// Asks for bytes that are read soon. Short rows far apart start too late otherwise: processors foresee only long runs.
// Not inline: GCC 12 takes a function that only prefetches for one without effect, and drops its calls.
void prefetch(const uint8_t* source, size_t num_bytes);

void copy_bytes(const uint8_t* source, uint8_t* target, size_t num_bytes, Store store);

// Makes this thread's streamed stores visible before what it stores next.
void store_fence();

}  // namespace fastdeploy_rl
