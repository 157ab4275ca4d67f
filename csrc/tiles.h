// Transposing copy: rows of elements become columns, tile by tile, with an optional cast and both checksums on the way.
#pragma once

#include <cstddef>
#include <memory>

#include "fletcher.h"
#include "job.h"
#include "kernels.h"

namespace fastdeploy_rl {

// A transposing job cut into tiles that the inner caches hold, and those into pieces for threads. A piece is a strip:
// some tiles below each other, which read the same columns and append to the same rows of the target.
class Tiling {
 public:
  explicit Tiling(const Job& job);

  size_t num_pieces() const { return num_strips_ * pieces_per_strip_; }

  // Bounds of a piece: rows and columns of the source.
  struct Block {
    size_t first_row, num_rows, first_column, num_columns;
  };
  Block piece(size_t index) const;

  size_t tile_rows() const { return tile_rows_; }

 private:
  size_t rows_, columns_;
  size_t tile_rows_, tile_columns_;
  size_t rows_per_piece_ = 0, pieces_per_strip_ = 0, num_strips_ = 0;
};

// Where a thread turns its tiles.
class TileBuffer {
 public:
  TileBuffer();
  uint8_t* rows() const { return blocks_.get()->bytes; }
  uint8_t* tile() const;

 private:
  struct alignas(kBlockBytes) Block {
    uint8_t bytes[kBlockBytes];
  };
  std::unique_ptr<Block[]> blocks_;
};

JobSums run_tiles(const Job& job, size_t piece, const TileBuffer& buffer, Store store);

}  // namespace fastdeploy_rl
