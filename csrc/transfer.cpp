#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "threads.h"

namespace fastdeploy_rl {

namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;       // What a thread takes at a time.
constexpr size_t kThreadedBytes = size_t{256} << 10;  // Fewer bytes are not worth a thread.
constexpr size_t kStreamedBytes = size_t{4} << 20;    // More bytes than the inner caches keep.
constexpr size_t kCastBlockValues = 2048;             // 8 KiB of F32 + 4 KiB of BF16 stay in the nearest cache.
constexpr size_t kShortRowBytes = size_t{16} << 10;
constexpr uint64_t kWordBytes = 4;

// A run of bytes from position `start` of a tensor: a first word that may miss its lower bytes, whole words, and a last
// word that may miss its upper ones.
struct Run {
  size_t head, num_words, tail;

  Run(uint64_t start, size_t num_bytes) {
    head = std::min<size_t>(num_bytes, (kWordBytes - start % kWordBytes) % kWordBytes);
    num_words = (num_bytes - head) / kWordBytes;
    tail = (num_bytes - head) % kWordBytes;
  }
};

uint64_t partial_word(const uint8_t* bytes, size_t count, uint64_t place) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, count);
  return word << (8 * place);
}

// Sums of a run that starts at position `start`, up to the end of its last word; `whole` sums its whole words.
template <typename Whole>
Sums run_sums(const uint8_t* source, size_t num_bytes, uint64_t start, Whole whole) {
  const Run run(start, num_bytes);
  Sums sums;
  if (run.head != 0) sums.add_word(partial_word(source, run.head, start % kWordBytes));
  if (run.num_words != 0) sums = append(sums, whole(run), run.num_words);
  if (run.tail != 0) sums.add_word(partial_word(source + num_bytes - run.tail, run.tail, 0));
  return sums;
}

Sums sum_run(const uint8_t* source, size_t num_bytes, uint64_t start) {
  return run_sums(source, num_bytes, start,
                  [&](const Run& run) { return sum_words(source + run.head, run.num_words); });
}

Sums copy_sum_run(const uint8_t* source, uint8_t* target, size_t num_bytes, uint64_t start, Store store) {
  const Run ends(start, num_bytes);
  std::memcpy(target, source, ends.head);
  std::memcpy(target + num_bytes - ends.tail, source + num_bytes - ends.tail, ends.tail);
  return run_sums(source, num_bytes, start, [&](const Run& run) {
    return copy_sum_words(source + run.head, target + run.head, run.num_words, store);
  });
}

uint64_t position(const Place& place, size_t row, size_t column) {
  return place.offset + row * place.row_stride + column;
}

// The contribution of a run to its tensor, from its own sums.
Sums placed(const Sums& sums, const Place& place, uint64_t start, size_t num_bytes) {
  return shift(sums, words_of(place.total_bytes) - words_of(start + num_bytes));
}

// Short rows whose lanes can run on from row to row, so that they are combined once for all rows: whole blocks, a whole
// number of blocks apart, and no word that is shared between two rows.
bool is_regular(const std::optional<Place>& place) {
  return !place || (place->row_stride % kBlockBytes == 0 && place->offset % kWordBytes == 0);
}

bool has_regular_rows(const Job& job) {
  return (job.read || job.live) && job.row_bytes % kBlockBytes == 0 && job.target_row_bytes % kBlockBytes == 0 &&
         std::max(job.row_bytes, job.target_row_bytes) <= kShortRowBytes && is_regular(job.read) &&
         is_regular(job.live);
}

// The sums of rows at one place, kept as lanes.
class RowSums {
 public:
  explicit RowSums(const std::optional<Place>& place)
      : place_(place), gap_(place ? place->row_stride / kWordBytes / static_cast<uint64_t>(kernels().num_lanes) : 0) {}

  void append(const BlockKernels& kernels, const Lanes& row) {
    if (place_) kernels.append(lanes_, gap_, row);
  }

  Sums finish(const BlockKernels& kernels, size_t last_row, size_t row_bytes) const {
    if (!place_) return {};
    return placed(combine(lanes_, kernels.num_lanes), *place_, position(*place_, last_row, 0), row_bytes);
  }

 private:
  const std::optional<Place>& place_;
  Gap gap_;
  Lanes lanes_{};
};

class RegularRows {
 public:
  RegularRows(const Job& job, Store store)
      : job_(job), store_(is_aligned(job) ? store : Store::cached), read_(job.read), live_(job.live) {}

  JobSums run(size_t first, size_t num_rows) {
    for (size_t row = first; row < first + num_rows; ++row) {
      const uint8_t* source = job_.source + row * job_.source_stride;
      uint8_t* target = job_.target == nullptr ? nullptr : job_.target + row * job_.target_stride;
      if (job_.cast == Cast::none) {
        copy(source, target);
      } else {
        cast(source, target);
      }
    }
    const size_t last = first + num_rows - 1;
    return {read_.finish(kernels_, last, job_.row_bytes), live_.finish(kernels_, last, job_.target_row_bytes)};
  }

 private:
  static bool is_aligned(const Job& job) {
    return (reinterpret_cast<uintptr_t>(job.target) | job.target_stride) % kBlockBytes == 0;
  }

  void copy(const uint8_t* source, uint8_t* target) {
    const Lanes lanes = write(source, target, job_.row_bytes);
    read_.append(kernels_, lanes);
    live_.append(kernels_, lanes);
  }

  void cast(const uint8_t* source, uint8_t* target) {
    if (job_.read) read_.append(kernels_, write(source, nullptr, job_.row_bytes));
    alignas(kBlockBytes) uint8_t values[kShortRowBytes];
    if (job_.cast == Cast::bf16_to_f32) {
      kernels_.bf16_to_f32(source, values, job_.row_bytes / 2);
    } else {
      kernels_.f32_to_bf16(source, values, job_.row_bytes / 4);
    }
    live_.append(kernels_, write(values, target, job_.target_row_bytes));
  }

  // The lanes of a row that is copied, or only looked at where there is no target.
  Lanes write(const uint8_t* source, uint8_t* target, size_t num_bytes) const {
    Lanes lanes;
    if (target == nullptr) {
      kernels_.sum(source, num_bytes / kBlockBytes, lanes);
    } else {
      kernels_.copy_sum(source, target, num_bytes / kBlockBytes, store_, lanes);
    }
    return lanes;
  }

  const Job& job_;
  const Store store_;
  const BlockKernels& kernels_ = kernels();
  RowSums read_, live_;
};

// Bytes of one job, in any shape.
class Piece {
 public:
  Piece(const Job& job, Store store) : job_(job), store_(store) {}

  // Bytes [begin, end) of the job, counted along its rows.
  JobSums run(size_t begin, size_t end) {
    while (begin < end) {
      const size_t row = begin / job_.row_bytes, column = begin % job_.row_bytes;
      const size_t num_rows = (end - begin) / job_.row_bytes;
      if (column == 0 && num_rows > 1 && has_regular_rows(job_)) {
        sums_ += RegularRows(job_, store_).run(row, num_rows);
        begin += num_rows * job_.row_bytes;
        continue;
      }
      const size_t count = std::min(end - begin, job_.row_bytes - column);
      run_row(row, column, count);
      begin += count;
    }
    return sums_;
  }

 private:
  void run_row(size_t row, size_t column, size_t count) {
    const uint8_t* source = job_.source + row * job_.source_stride + column;
    if (job_.cast == Cast::none) {
      copy(source, target_at(row, column), row, column, count);
    } else {
      cast(source, row, column, count);
    }
  }

  // nullptr where nothing is written.
  uint8_t* target_at(size_t row, size_t column) const {
    return job_.target == nullptr ? nullptr : job_.target + row * job_.target_stride + column;
  }

  void read(const uint8_t* source, size_t row, size_t column, size_t count) {
    if (!job_.read) return;
    const uint64_t start = position(*job_.read, row, column);
    sums_.read += placed(sum_run(source, count, start), *job_.read, start, count);
  }

  void write(const uint8_t* source, uint8_t* target, size_t row, size_t column, size_t count) {
    if (job_.live) {
      const uint64_t start = position(*job_.live, row, column);
      sums_.live += placed(write_summed(source, target, count, start), *job_.live, start, count);
    } else if (target != nullptr) {
      copy_bytes(source, target, count, store_);
    }
  }

  Sums write_summed(const uint8_t* source, uint8_t* target, size_t count, uint64_t start) const {
    return target == nullptr ? sum_run(source, count, start) : copy_sum_run(source, target, count, start, store_);
  }

  void copy(const uint8_t* source, uint8_t* target, size_t row, size_t column, size_t count) {
    if (!job_.read) return write(source, target, row, column, count);
    const uint64_t start = position(*job_.read, row, column);
    place_twice(write_summed(source, target, count, start), start, source, row, column, count);
  }

  // Without a cast the same bytes have both places; where they fall alike on words, the sums of one serve both.
  void place_twice(const Sums& sums, uint64_t start, const uint8_t* source, size_t row, size_t column, size_t count) {
    sums_.read += placed(sums, *job_.read, start, count);
    if (!job_.live) return;
    const uint64_t live_start = position(*job_.live, row, column);
    const bool is_alike = start % kWordBytes == live_start % kWordBytes;
    sums_.live += placed(is_alike ? sums : sum_run(source, count, live_start), *job_.live, live_start, count);
  }

  void cast(const uint8_t* source, size_t row, size_t column, size_t count) {
    const bool widens = job_.cast == Cast::bf16_to_f32;
    const size_t source_value = widens ? 2 : 4, target_value = widens ? 4 : 2;
    alignas(64) uint8_t values[4 * kCastBlockValues];
    for (size_t done = 0; done < count;) {
      const size_t num_values = std::min(kCastBlockValues, (count - done) / source_value);
      read(source + done, row, column + done, num_values * source_value);
      (widens ? kernels().bf16_to_f32 : kernels().f32_to_bf16)(source + done, values, num_values);
      const size_t target_column = (column + done) / source_value * target_value;
      write(values, target_at(row, target_column), row, target_column, num_values * target_value);
      done += num_values * source_value;
    }
  }

  const Job& job_;
  const Store store_;
  JobSums sums_;
};

// All jobs cut into pieces; piece i of the whole belongs to the job whose range of pieces holds i.
class Pieces {
 public:
  explicit Pieces(const std::vector<const Job*>& jobs) : jobs_(jobs), sums_(jobs.size()) {
    ends_.reserve(jobs.size());
    for (const Job* job : jobs) {
      num_pieces_ += (job->num_bytes() + kPieceBytes - 1) / kPieceBytes;
      num_bytes_ += job->num_bytes();
      ends_.push_back(num_pieces_);
    }
    if (num_bytes_ >= kStreamedBytes) store_ = Store::streamed;
  }

  size_t num_bytes() const { return num_bytes_; }
  std::vector<JobSums> sums() const { return sums_; }

  void work() {
    for (size_t piece = next_++; piece < num_pieces_; piece = next_++) run(piece);
    if (store_ == Store::streamed) store_fence();
  }

 private:
  void run(size_t piece) {
    const auto index = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), piece) - ends_.begin());
    const Job& job = *jobs_[index];
    const size_t begin = (piece - (index == 0 ? 0 : ends_[index - 1])) * kPieceBytes;
    const JobSums sums = Piece(job, store_).run(begin, std::min(begin + kPieceBytes, job.num_bytes()));
    const std::lock_guard<std::mutex> lock(mutex_);
    sums_[index] += sums;
  }

  const std::vector<const Job*>& jobs_;
  std::vector<size_t> ends_;
  size_t num_pieces_ = 0;
  size_t num_bytes_ = 0;
  Store store_ = Store::cached;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::vector<JobSums> sums_;
};

static_assert(kPieceBytes % 8 == 0, "a cut between pieces must not fall inside a value or, in an aligned row, a word");

}  // namespace

std::vector<JobSums> run_jobs(const std::vector<const Job*>& jobs, int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be positive, got " + std::to_string(num_threads));
  Pieces pieces(jobs);
  const int threads = pieces.num_bytes() < kThreadedBytes ? 1 : num_threads;
  run_on_threads(threads, [&pieces](int) { pieces.work(); });
  return pieces.sums();
}

}  // namespace fastdeploy_rl
