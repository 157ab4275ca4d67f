#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "kernels.h"
#include "threads.h"

namespace fastdeploy_rl {

namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;       // What a thread takes at a time.
constexpr size_t kThreadedBytes = size_t{256} << 10;  // Fewer bytes are not worth a thread.
constexpr size_t kStreamedBytes = size_t{4} << 20;    // More bytes than the inner caches keep.
constexpr size_t kCastBlockValues = 2048;             // 8 KiB of F32 + 4 KiB of BF16 stay in the nearest cache.
constexpr uint64_t kWordBytes = 4;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

size_t checked_count(int64_t value, const char* what) {
  if (value < 0) refuse(std::string(what) + " must not be negative, got " + std::to_string(value));
  return static_cast<size_t>(value);
}

// Bytes from the first byte of the first row to the last byte of the last one; saturates instead of wrapping.
size_t extent(size_t rows, size_t row_bytes, size_t stride) {
  if (rows == 0 || row_bytes == 0) return 0;
  const unsigned __int128 bytes = static_cast<unsigned __int128>(rows - 1) * stride + row_bytes;
  return bytes > SIZE_MAX ? SIZE_MAX : static_cast<size_t>(bytes);
}

void check_rows(const char* what, size_t offset, size_t stride, size_t rows, size_t row_bytes, size_t num_bytes) {
  const std::string name(what);
  if (rows > 1 && stride < row_bytes) {
    refuse(name + " stride " + std::to_string(stride) + " is less than a row of " + std::to_string(row_bytes) +
           " bytes");
  }
  if (offset > num_bytes || extent(rows, row_bytes, stride) > num_bytes - offset) {
    refuse(name + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes, stride " +
           std::to_string(stride) + ", from offset " + std::to_string(offset) + " are not inside " +
           std::to_string(num_bytes) + " bytes");
  }
}

size_t cast_row_bytes(size_t row_bytes, Cast cast) {
  switch (cast) {
    case Cast::none:
      return row_bytes;
    case Cast::f32_to_bf16:
      if (row_bytes % 4 != 0) refuse("row_bytes " + std::to_string(row_bytes) + " is no number of F32 values");
      return row_bytes / 2;
    case Cast::bf16_to_f32:
      if (row_bytes % 2 != 0) refuse("row_bytes " + std::to_string(row_bytes) + " is no number of BF16 values");
      if (row_bytes > SIZE_MAX / 2) refuse("row_bytes " + std::to_string(row_bytes) + " is too large");
      return row_bytes * 2;
  }
  refuse("unknown cast");
}

void check_place(const char* what, const std::optional<Place>& place, size_t rows, size_t row_bytes) {
  if (place) check_rows(what, place->offset, place->row_stride, rows, row_bytes, place->total_bytes);
}

void check_overlap(const Job& job) {
  const size_t source_bytes = extent(job.rows, job.row_bytes, job.source_stride);
  const size_t target_bytes = extent(job.rows, job.target_row_bytes, job.target_stride);
  const auto source = reinterpret_cast<uintptr_t>(job.source), target = reinterpret_cast<uintptr_t>(job.target);
  if (source < target + target_bytes && target < source + source_bytes) refuse("source and target overlap");
}

uint64_t words_of(uint64_t num_bytes) { return num_bytes / kWordBytes + (num_bytes % kWordBytes != 0); }

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

class Piece {
 public:
  Piece(const Job& job, Store store) : job_(job), store_(store) {}

  // Bytes [begin, end) of the job, counted along its rows.
  JobSums run(size_t begin, size_t end) {
    while (begin < end) {
      const size_t row = begin / job_.row_bytes, column = begin % job_.row_bytes;
      const size_t count = std::min(end - begin, job_.row_bytes - column);
      run_row(row, column, count);
      begin += count;
    }
    return sums_;
  }

 private:
  void run_row(size_t row, size_t column, size_t count) {
    const uint8_t* source = job_.source + row * job_.source_stride + column;
    if (job_.target == nullptr) {
      look(source, row, column, count);
    } else if (job_.cast == Cast::none) {
      copy(source, job_.target + row * job_.target_stride + column, row, column, count);
    } else {
      cast(source, row, column, count);
    }
  }

  void read(const uint8_t* source, size_t row, size_t column, size_t count) {
    if (!job_.read) return;
    const uint64_t start = position(*job_.read, row, column);
    sums_.read += placed(sum_run(source, count, start), *job_.read, start, count);
  }

  void write(const uint8_t* source, uint8_t* target, size_t row, size_t column, size_t count) {
    if (!job_.live) return copy_bytes(source, target, count, store_);
    const uint64_t start = position(*job_.live, row, column);
    sums_.live += placed(copy_sum_run(source, target, count, start, store_), *job_.live, start, count);
  }

  void look(const uint8_t* source, size_t row, size_t column, size_t count) {
    if (!job_.read && !job_.live) return;
    const uint64_t start = position(job_.read ? *job_.read : *job_.live, row, column);
    place_twice(sum_run(source, count, start), start, source, row, column, count);
  }

  void copy(const uint8_t* source, uint8_t* target, size_t row, size_t column, size_t count) {
    if (!job_.read) return write(source, target, row, column, count);
    const uint64_t start = position(*job_.read, row, column);
    place_twice(copy_sum_run(source, target, count, start, store_), start, source, row, column, count);
  }

  // Without a cast the same bytes have both places; where they fall alike on words, the sums of one serve both.
  void place_twice(const Sums& sums, uint64_t start, const uint8_t* source, size_t row, size_t column, size_t count) {
    if (job_.read) sums_.read += placed(sums, *job_.read, start, count);
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
      uint8_t* target = job_.target + row * job_.target_stride + target_column;
      write(values, target, row, target_column, num_values * target_value);
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
    sums_[index].read += sums.read;
    sums_[index].live += sums.live;
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

Cast parse_cast(const std::string& name) {
  if (name == "none") return Cast::none;
  if (name == "F32_BF16") return Cast::f32_to_bf16;
  if (name == "BF16_F32") return Cast::bf16_to_f32;
  refuse("unknown cast '" + name + "': expected none, F32_BF16 or BF16_F32");
}

Place checked_place(int64_t offset, int64_t row_stride, int64_t total_bytes) {
  return {checked_count(offset, "offset"), checked_count(row_stride, "row_stride"),
          checked_count(total_bytes, "total_bytes")};
}

Job checked_job(Bytes source, Rows source_rows, std::optional<Bytes> target, Rows target_rows, int64_t rows,
                int64_t row_bytes, Cast cast, std::optional<Place> read, std::optional<Place> live) {
  Job job{};
  job.rows = checked_count(rows, "rows");
  job.row_bytes = checked_count(row_bytes, "row_bytes");
  job.source_stride = checked_count(source_rows.stride, "source_stride");
  job.target_stride = checked_count(target_rows.stride, "target_stride");
  job.cast = cast;
  job.target_row_bytes = cast_row_bytes(job.row_bytes, cast);
  job.read = read;
  job.live = live;
  const size_t source_offset = checked_count(source_rows.offset, "source_offset");
  check_rows("source", source_offset, job.source_stride, job.rows, job.row_bytes, source.num_bytes);
  job.source = source.data + source_offset;
  check_place("read_place", read, job.rows, job.row_bytes);
  check_place("live_place", live, job.rows, job.target_row_bytes);
  if (!target) {
    if (cast != Cast::none) refuse("a cast needs a target");
    return job;
  }
  const size_t target_offset = checked_count(target_rows.offset, "target_offset");
  check_rows("target", target_offset, job.target_stride, job.rows, job.target_row_bytes, target->num_bytes);
  job.target = target->data + target_offset;
  check_overlap(job);
  return job;
}

std::vector<JobSums> run_jobs(const std::vector<const Job*>& jobs, int num_threads) {
  if (num_threads < 1) refuse("num_threads must be positive, got " + std::to_string(num_threads));
  Pieces pieces(jobs);
  const int threads = pieces.num_bytes() < kThreadedBytes ? 1 : num_threads;
  run_on_threads(threads, [&pieces](int) { pieces.work(); });
  return pieces.sums();
}

}  // namespace fastdeploy_rl
