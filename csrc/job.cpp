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
  if (!target) return job;
  const size_t target_offset = checked_count(target_rows.offset, "target_offset");
  check_rows("target", target_offset, job.target_stride, job.rows, job.target_row_bytes, target->num_bytes);
  job.target = target->data + target_offset;
  check_overlap(job);
  return job;
}

}  // namespace fastdeploy_rl
