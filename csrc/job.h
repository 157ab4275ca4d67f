// One strided 2-D job of a transfer, and the checks that make it safe to run.
// Invariant: a Job made by `checked_job` touches no byte outside its buffers and its places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "cast.h"

namespace fastdeploy_rl {

// Rows start at offset + i * row_stride of a tensor of total_bytes.
struct Place {
  uint64_t offset;
  uint64_t row_stride;
  uint64_t total_bytes;
};

// Rows of a region in one buffer, as a caller gives them.
struct Rows {
  int64_t offset;
  int64_t stride;
};

struct Bytes {
  uint8_t* data;
  size_t num_bytes;
};

// What becomes of the source, as a caller gives it; row_bytes are bytes of the source.
struct Shape {
  int64_t rows;
  int64_t row_bytes;
  Cast cast;
  int64_t transpose_item;  // Bytes of one source element; 0: rows stay rows.
};

struct Job {
  const uint8_t* source;
  size_t source_stride;
  uint8_t* target;  // nullptr: nothing is written, only summed.
  size_t target_stride;
  size_t rows;
  size_t row_bytes;  // In the source.
  size_t target_rows;
  size_t target_row_bytes;
  Cast cast;
  size_t transpose_item;  // 0: rows stay rows; else the elements of a source row become rows of the target.
  std::optional<Place> read;
  std::optional<Place> live;

  size_t num_bytes() const { return rows * row_bytes; }
  // Bytes of one element of a transposed target.
  size_t target_item() const { return cast == Cast::none ? transpose_item : kind_of(cast).target_value; }
};

Cast parse_cast(const std::string& name);

Place checked_place(int64_t offset, int64_t row_stride, int64_t total_bytes);

// std::invalid_argument says which bound is broken.
Job checked_job(Bytes source, Rows source_rows, std::optional<Bytes> target, Rows target_rows, const Shape& shape,
                std::optional<Place> read, std::optional<Place> live);

// ceil(num_bytes / 4), for every num_bytes.
inline uint64_t words_of(uint64_t num_bytes) { return num_bytes / 4 + (num_bytes % 4 != 0); }

}  // namespace fastdeploy_rl
