#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "summed_run.h"

namespace fastdeploy_rl {

namespace {

constexpr size_t kRunBytes = 512;                // Of a row of a tile, on its longer side: long enough to stream.
constexpr size_t kPrefetchRows = 8;              // So many rows are asked for ahead.
constexpr size_t kPieceBytes = size_t{2} << 20;  // About what a thread takes at a time.
constexpr size_t kMaxColumns = kRunBytes;        // Of a tile of single bytes.
constexpr size_t kMaxRowBytes = 2 * kRunBytes;   // Of a row of a tile once it is cast to a wider type.
constexpr size_t kRowStride = kMaxRowBytes + kBlockBytes;  // No power of two: rows would share the same cache sets.
constexpr size_t kTileStride = kRunBytes + kBlockBytes;
constexpr size_t kRowsBytes = kBlockBytes * kRowStride;
constexpr size_t kTileBytes = kMaxColumns * kTileStride;

size_t divided_up(size_t count, size_t by) { return count / by + (count % by != 0); }

// One tile: source rows are cast and summed into a buffer of a few rows, turned into a buffer of the whole tile, and
// from there summed and written as rows of the target.
class Tile {
 public:
  Tile(const Job& job, const TileBuffer& buffer, Store store, RunSums& sums)
      : job_(job), buffer_(buffer), store_(store), sums_(sums), item_(job.target_item()) {}

  void run(const Tiling::Block& block) {
    const size_t group_rows = kBlockBytes / item_;
    for (size_t row = 0; row < block.num_rows; row += group_rows) {
      const size_t count = std::min(group_rows, block.num_rows - row);
      for (size_t i = 0; i < count; ++i) {
        prefetch_row(block, row + i + kPrefetchRows);
        read_row(block, row + i, buffer_.rows() + i * kRowStride);
      }
      kernels().transpose(item_)(buffer_.rows(), kRowStride, buffer_.tile() + row * item_, kTileStride,
                                 block.num_columns);
    }
    for (size_t column = 0; column < block.num_columns; ++column) write_row(block, column);
  }

 private:
  // Also rows of the next tile, which lies below.
  void prefetch_row(const Tiling::Block& block, size_t row_of_block) {
    const size_t row = block.first_row + row_of_block, item = job_.transpose_item;
    if (row >= job_.rows) return;
    prefetch(job_.source + row * job_.source_stride + block.first_column * item, block.num_columns * item);
  }

  void read_row(const Tiling::Block& block, size_t row_of_block, uint8_t* values) {
    const size_t row = block.first_row + row_of_block, column = block.first_column * job_.transpose_item;
    const size_t num_bytes = block.num_columns * job_.transpose_item;
    const uint8_t* source = job_.source + row * job_.source_stride + column;
    const bool is_cast = job_.cast != Cast::none;
    RunSums::take(sums_.read(), source, is_cast ? nullptr : values, num_bytes, row, column, Store::cached);
    if (is_cast) kernels().cast(job_.cast)(source, values, block.num_columns);
  }

  void write_row(const Tiling::Block& block, size_t column_of_block) {
    const size_t row = block.first_column + column_of_block, column = block.first_row * item_;
    const uint8_t* values = buffer_.tile() + column_of_block * kTileStride;
    uint8_t* target = job_.target == nullptr ? nullptr : job_.target + row * job_.target_stride + column;
    RunSums::take(sums_.live(), values, target, block.num_rows * item_, row, column, store_);
  }

  const Job& job_;
  const TileBuffer& buffer_;
  const Store store_;
  RunSums& sums_;
  const size_t item_;
};

}  // namespace

Tiling::Tiling(const Job& job)
    : rows_(job.rows),
      columns_(job.target_rows),
      tile_rows_(kRunBytes / job.target_item()),
      tile_columns_(kRunBytes / job.transpose_item) {
  if (rows_ == 0 || columns_ == 0) return;
  num_strips_ = divided_up(columns_, tile_columns_);
  const size_t strip_bytes = std::min(columns_, tile_columns_) * job.transpose_item;
  rows_per_piece_ = divided_up(kPieceBytes / strip_bytes, tile_rows_) * tile_rows_;
  pieces_per_strip_ = divided_up(rows_, rows_per_piece_);
}

Tiling::Block Tiling::piece(size_t index) const {
  const size_t first_row = index % pieces_per_strip_ * rows_per_piece_;
  const size_t first_column = index / pieces_per_strip_ * tile_columns_;
  return {first_row, std::min(rows_per_piece_, rows_ - first_row), first_column,
          std::min(tile_columns_, columns_ - first_column)};
}

TileBuffer::TileBuffer() : blocks_(new Block[(kRowsBytes + kTileBytes) / kBlockBytes]()) {}

uint8_t* TileBuffer::tile() const { return rows() + kRowsBytes; }

JobSums run_tiles(const Job& job, size_t piece, const TileBuffer& buffer, Store store) {
  const Tiling tiling(job);
  const Tiling::Block whole = tiling.piece(piece);
  RunSums sums(job);
  for (size_t done = 0; done < whole.num_rows; done += tiling.tile_rows()) {
    const size_t num_rows = std::min(tiling.tile_rows(), whole.num_rows - done);
    Tile(job, buffer, store, sums).run({whole.first_row + done, num_rows, whole.first_column, whole.num_columns});
  }
  return {sums.read().total(), sums.live().total()};
}

}  // namespace fastdeploy_rl
