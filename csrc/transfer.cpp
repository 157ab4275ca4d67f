#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "summed_run.h"
#include "threads.h"
#include "tiles.h"

namespace fastdeploy_rl {

namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;       // What a thread takes at a time.
constexpr size_t kThreadedBytes = size_t{256} << 10;  // Fewer bytes are not worth a thread.
constexpr size_t kStreamedBytes = size_t{4} << 20;    // More bytes than the inner caches keep.
constexpr size_t kAheadBytes = size_t{8} << 10;       // Rows that are so far ahead are asked for.
constexpr size_t kCastBlockValues = 2048;             // 8 KiB of F32 + 4 KiB of BF16 stay in the nearest cache.

// Bytes of one job whose rows stay rows.
class Piece {
 public:
  Piece(const Job& job, Store store) : job_(job), store_(store), sums_(job) {}

  // Bytes [begin, end) of the job, counted along its rows.
  JobSums run(size_t begin, size_t end) {
    while (begin < end) {
      const size_t row = begin / job_.row_bytes, column = begin % job_.row_bytes;
      const size_t count = std::min(end - begin, job_.row_bytes - column);
      run_row(row, column, count);
      begin += count;
    }
    return {sums_.read().total(), sums_.live().total()};
  }

 private:
  // Not rows that follow each other at once, or are long: those the processor foresees itself.
  void prefetch_row(size_t row) const {
    if (row >= job_.rows || job_.row_bytes > kAheadBytes || job_.source_stride <= job_.row_bytes) return;
    prefetch(job_.source + row * job_.source_stride, job_.row_bytes);
  }

  void run_row(size_t row, size_t column, size_t count) {
    const uint8_t* source = job_.source + row * job_.source_stride + column;
    prefetch_row(row + kAheadBytes / job_.row_bytes);
    if (job_.cast == Cast::none) {
      sums_.take_both(source, target_at(row, column), count, row, column, store_);
    } else {
      cast(source, row, column, count);
    }
  }

  // nullptr where nothing is written.
  uint8_t* target_at(size_t row, size_t column) const {
    return job_.target == nullptr ? nullptr : job_.target + row * job_.target_stride + column;
  }

  void cast(const uint8_t* source, size_t row, size_t column, size_t count) {
    const CastKind& kind = kind_of(job_.cast);
    alignas(64) uint8_t values[4 * kCastBlockValues];
    for (size_t done = 0; done < count;) {
      const size_t num_values = std::min(kCastBlockValues, (count - done) / kind.source_value);
      const size_t num_bytes = num_values * kind.source_value, target_bytes = num_values * kind.target_value;
      const size_t target_column = (column + done) / kind.source_value * kind.target_value;
      RunSums::take(sums_.read(), source + done, nullptr, num_bytes, row, column + done, Store::cached);
      kernels().cast(job_.cast)(source + done, values, num_values);
      RunSums::take(sums_.live(), values, target_at(row, target_column), target_bytes, row, target_column, store_);
      done += num_bytes;
    }
  }

  const Job& job_;
  const Store store_;
  RunSums sums_;
};

// All jobs cut into pieces; piece i of the whole belongs to the job whose range of pieces holds i.
class Pieces {
 public:
  Pieces(const std::vector<const Job*>& jobs, int num_threads) : jobs_(jobs), sums_(jobs.size()) {
    ends_.reserve(jobs.size());
    for (const Job* job : jobs) {
      num_pieces_ += num_pieces(*job);
      num_bytes_ += job->num_bytes();
      ends_.push_back(num_pieces_);
    }
    if (num_bytes_ >= kStreamedBytes) store_ = Store::streamed;
    if (num_bytes_ < kThreadedBytes) num_threads = 1;
    if (std::any_of(jobs.begin(), jobs.end(), [](const Job* job) { return job->transpose_item != 0; })) {
      tile_buffers_.resize(static_cast<size_t>(num_threads));
    }
    num_threads_ = num_threads;
  }

  int num_threads() const { return num_threads_; }
  std::vector<JobSums> sums() const { return sums_; }

  void work(int thread) {
    TileBuffer* tiles = tile_buffers_.empty() ? nullptr : &tile_buffers_[static_cast<size_t>(thread)];
    for (size_t piece = next_++; piece < num_pieces_; piece = next_++) run(piece, tiles);
    if (store_ == Store::streamed) store_fence();
  }

 private:
  static size_t num_pieces(const Job& job) {
    if (job.transpose_item != 0) return Tiling(job).num_pieces();
    return (job.num_bytes() + kPieceBytes - 1) / kPieceBytes;
  }

  void run(size_t piece, TileBuffer* tiles) {
    const auto index = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), piece) - ends_.begin());
    const Job& job = *jobs_[index];
    const JobSums sums = run_piece(job, piece - (index == 0 ? 0 : ends_[index - 1]), tiles);
    const std::lock_guard<std::mutex> lock(mutex_);
    sums_[index] += sums;
  }

  JobSums run_piece(const Job& job, size_t piece, TileBuffer* tiles) const {
    if (job.transpose_item != 0) return run_tiles(job, piece, *tiles, store_);
    const size_t begin = piece * kPieceBytes;
    return Piece(job, store_).run(begin, std::min(begin + kPieceBytes, job.num_bytes()));
  }

  const std::vector<const Job*>& jobs_;
  std::vector<size_t> ends_;
  size_t num_pieces_ = 0;
  size_t num_bytes_ = 0;
  int num_threads_;
  std::vector<TileBuffer> tile_buffers_;  // One a thread, where something is transposed.
  Store store_ = Store::cached;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::vector<JobSums> sums_;
};

static_assert(kPieceBytes % 8 == 0, "a cut between pieces must not fall inside a value or, in an aligned row, a word");

}  // namespace

std::vector<JobSums> run_jobs(const std::vector<const Job*>& jobs, int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be positive, got " + std::to_string(num_threads));
  Pieces pieces(jobs, num_threads);
  run_on_threads(pieces.num_threads(), [&pieces](int thread) { pieces.work(thread); });
  return pieces.sums();
}

}  // namespace fastdeploy_rl
