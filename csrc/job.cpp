#include "job.h"

#include <stdexcept>

namespace fastdeploy_rl {

namespace {

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

void check_inside(const char* what, size_t offset, size_t stride, size_t rows, size_t row_bytes, size_t num_bytes) {
  if (offset <= num_bytes && extent(rows, row_bytes, stride) <= num_bytes - offset) return;
  refuse(std::string(what) + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes, stride " +
         std::to_string(stride) + ", from offset " + std::to_string(offset) + " are not inside " +
         std::to_string(num_bytes) + " bytes");
}

void check_rows(const char* what, size_t offset, size_t stride, size_t rows, size_t row_bytes, size_t num_bytes) {
  if (rows > 1 && stride < row_bytes) {
    refuse(std::string(what) + " stride " + std::to_string(stride) + " is less than a row of " +
           std::to_string(row_bytes) + " bytes");
  }
  check_inside(what, offset, stride, rows, row_bytes, num_bytes);
}

// The same row again and again is counted nowhere: no checksum says how often a byte was read.
void check_source(const Job& job, size_t offset, size_t num_bytes) {
  const bool is_repeated = job.source_stride == 0 && !job.read;
  (is_repeated ? check_inside : check_rows)("source", offset, job.source_stride, job.rows, job.row_bytes, num_bytes);
}

size_t checked_product(size_t count, size_t bytes) {
  size_t product;
  if (__builtin_mul_overflow(count, bytes, &product) || product > SIZE_MAX / 2) {
    refuse(std::to_string(count) + " times " + std::to_string(bytes) + " bytes are too many");
  }
  return product;
}

size_t checked_values(size_t row_bytes, Cast cast) {
  const CastKind& kind = kind_of(cast);
  if (row_bytes % kind.source_value != 0) {
    refuse("row_bytes " + std::to_string(row_bytes) + " is no number of values that " + kind.name + " casts");
  }
  return row_bytes / kind.source_value;
}

void check_item(const Job& job) {
  const size_t item = job.transpose_item;
  if (item != 1 && item != 2 && item != 4 && item != 8) {
    refuse("transpose_item must be 0, 1, 2, 4 or 8, got " + std::to_string(item));
  }
  if (job.row_bytes % item != 0) {
    refuse("row_bytes " + std::to_string(job.row_bytes) + " is no number of elements of " + std::to_string(item) +
           " bytes");
  }
  if (job.cast != Cast::none && item != kind_of(job.cast).source_value) {
    refuse(std::string(kind_of(job.cast).name) + " casts no elements of " + std::to_string(item) + " bytes");
  }
}

void shape_target(Job& job) {
  const size_t row_bytes = checked_product(checked_values(job.row_bytes, job.cast), kind_of(job.cast).target_value);
  checked_product(job.rows, job.row_bytes);
  checked_product(job.rows, row_bytes);
  if (job.transpose_item == 0) {
    job.target_rows = job.rows;
    job.target_row_bytes = row_bytes;
    return;
  }
  check_item(job);
  job.target_rows = job.row_bytes / job.transpose_item;
  job.target_row_bytes = checked_product(job.rows, job.target_item());
}

void check_place(const char* what, const std::optional<Place>& place, size_t rows, size_t row_bytes) {
  if (place) check_rows(what, place->offset, place->row_stride, rows, row_bytes, place->total_bytes);
}

void check_overlap(const Job& job) {
  const size_t source_bytes = extent(job.rows, job.row_bytes, job.source_stride);
  const size_t target_bytes = extent(job.target_rows, job.target_row_bytes, job.target_stride);
  const auto source = reinterpret_cast<uintptr_t>(job.source), target = reinterpret_cast<uintptr_t>(job.target);
  if (source < target + target_bytes && target < source + source_bytes) refuse("source and target overlap");
}

}  // namespace

Cast parse_cast(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < kNumCasts; ++i) {
    if (name == kCasts[i].name) return static_cast<Cast>(i);
    known += std::string(" ") + kCasts[i].name;
  }
  refuse("unknown cast '" + name + "'; known are" + known);
}

Place checked_place(int64_t offset, int64_t row_stride, int64_t total_bytes) {
  return {checked_count(offset, "offset"), checked_count(row_stride, "row_stride"),
          checked_count(total_bytes, "total_bytes")};
}

Job checked_job(Bytes source, Rows source_rows, std::optional<Bytes> target, Rows target_rows, const Shape& shape,
                std::optional<Place> read, std::optional<Place> live) {
  Job job{};
  job.rows = checked_count(shape.rows, "rows");
  job.row_bytes = checked_count(shape.row_bytes, "row_bytes");
  job.transpose_item = checked_count(shape.transpose_item, "transpose_item");
  job.cast = shape.cast;
  job.source_stride = checked_count(source_rows.stride, "source_stride");
  job.target_stride = checked_count(target_rows.stride, "target_stride");
  job.read = read;
  job.live = live;
  shape_target(job);
  const size_t source_offset = checked_count(source_rows.offset, "source_offset");
  check_source(job, source_offset, source.num_bytes);
  job.source = source.data + source_offset;
  check_place("read_place", read, job.rows, job.row_bytes);
  check_place("live_place", live, job.target_rows, job.target_row_bytes);
  if (!target) return job;
  const size_t target_offset = checked_count(target_rows.offset, "target_offset");
  check_rows("target", target_offset, job.target_stride, job.target_rows, job.target_row_bytes, target->num_bytes);
  job.target = target->data + target_offset;
  check_overlap(job);
  return job;
}

}  // namespace fastdeploy_rl
