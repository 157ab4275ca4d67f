// Copies and sums runs of bytes that lie anywhere in tensors: the one place that knows of words cut at a run's ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "fletcher.h"
#include "job.h"
#include "kernels.h"

namespace fastdeploy_rl {

// What runs of bytes count at their place in a tensor, all other bytes taken as zero.
class PlacedSums {
 public:
  explicit PlacedSums(const std::optional<Place>& place) : place_(place) {}

  bool is_asked() const { return place_.has_value(); }

  // Where a byte stands in the tensor. Only where sums are asked for.
  uint64_t position(size_t row, size_t column) const { return place_->offset + row * place_->row_stride + column; }

  // Sums of words that end at position `end`.
  void add(const Sums& words, uint64_t end) { sums_ += shift(words, words_after(end)); }
  void add(const Lanes& words, uint64_t end) {
    has_lanes_ = true;
    kernels_.add(lanes_, words, Gap(words_after(end)));
  }

  Sums total() const {
    Sums sums = sums_;
    if (has_lanes_) sums += combine(lanes_, kernels_.num_lanes);
    return sums;
  }

 private:
  uint64_t words_after(uint64_t end) const { return words_of(place_->total_bytes) - words_of(end); }

  const std::optional<Place>& place_;
  const BlockKernels& kernels_ = kernels();
  bool has_lanes_ = false;
  Sums sums_;
  WeightedLanes lanes_;
};

// The sums of a run of bytes, part by part, each given as `give(Sums or Lanes, bytes up to the end of the part)`.
// `phase` is where the run starts inside a word; words that it holds in part count the bytes they have. The bytes are
// copied to `target` in the same pass, unless that is nullptr.
template <typename Give>
class SummedRun {
 public:
  SummedRun(const uint8_t* source, uint8_t* target, Store store, Give give)
      : source_(source), target_(target), store_(store), give_(give) {}

  void run(size_t num_bytes, uint64_t phase) {
    Sums first;
    const size_t head = std::min<size_t>(num_bytes, (kWordBytes - phase) % kWordBytes);
    if (head != 0) first.add_word(take_partial(head, phase));
    const size_t num_words = (num_bytes - head) / kWordBytes, few = words_to_boundary(num_words);
    take_words(few, first);
    if (done_ != 0) give_(first, done_);
    take_blocks((num_words - few) / kBlockWords);
    Sums last;
    const size_t before = done_;
    take_words((num_words - few) % kBlockWords, last);
    if (done_ != num_bytes) last.add_word(take_partial(num_bytes - done_, 0));
    if (done_ != before) give_(last, done_);
  }

 private:
  static constexpr size_t kBlockWords = kBlockBytes / kWordBytes;

  // Streamed stores start at a block of the target, and whole words must reach it.
  size_t words_to_boundary(size_t num_words) {
    if (store_ == Store::cached || target_ == nullptr) return 0;
    const size_t num_bytes = bytes_to_boundary(target_ + done_);
    if (num_bytes % kWordBytes == 0) return std::min(num_words, num_bytes / kWordBytes);
    store_ = Store::cached;
    return 0;
  }

  uint64_t take_partial(size_t count, uint64_t phase) {
    uint64_t word = 0;
    std::memcpy(&word, source_ + done_, count);
    if (target_ != nullptr) std::memcpy(target_ + done_, &word, count);
    done_ += count;
    return word << (8 * phase);
  }

  void take_words(size_t count, Sums& sums) {
    for (size_t i = 0; i < count; ++i) sums.add_word(take_partial(kWordBytes, 0));
  }

  void take_blocks(size_t count) {
    if (count == 0) return;
    Lanes lanes;
    if (target_ == nullptr) {
      kernels().sum(source_ + done_, count, lanes);
    } else {
      kernels().copy_sum(source_ + done_, target_ + done_, count, store_, lanes);
    }
    done_ += count * kBlockBytes;
    give_(lanes, done_);
  }

  const uint8_t* const source_;
  uint8_t* const target_;
  Store store_;
  Give give_;
  size_t done_ = 0;
};

// Bytes that have two places, alike or not: as they were read and as they are written.
class RunSums {
 public:
  explicit RunSums(const Job& job) : read_(job.read), live_(job.live) {}

  PlacedSums& read() { return read_; }
  PlacedSums& live() { return live_; }

  // Copies a run (not where target is nullptr) and counts it at one place, or at none.
  static void take(PlacedSums& sums, const uint8_t* source, uint8_t* target, size_t num_bytes, size_t row,
                   size_t column, Store store) {
    if (!sums.is_asked()) {
      if (target != nullptr) copy_bytes(source, target, num_bytes, store);
      return;
    }
    const uint64_t start = sums.position(row, column);
    const auto give = [&sums, start](const auto& part, size_t end) { sums.add(part, start + end); };
    SummedRun<decltype(give)>(source, target, store, give).run(num_bytes, start % kWordBytes);
  }

  // The same for bytes that are written as they were read; where both places fall alike on words, one sum serves both.
  void take_both(const uint8_t* source, uint8_t* target, size_t num_bytes, size_t row, size_t column, Store store) {
    if (!read_.is_asked()) return take(live_, source, target, num_bytes, row, column, store);
    if (!live_.is_asked()) return take(read_, source, target, num_bytes, row, column, store);
    const uint64_t read = read_.position(row, column), live = live_.position(row, column);
    if (read % kWordBytes != live % kWordBytes) {
      take(read_, source, target, num_bytes, row, column, store);
      return take(live_, source, nullptr, num_bytes, row, column, store);
    }
    const auto give = [this, read, live](const auto& part, size_t end) {
      read_.add(part, read + end);
      live_.add(part, live + end);
    };
    SummedRun<decltype(give)>(source, target, store, give).run(num_bytes, read % kWordBytes);
  }

 private:
  PlacedSums read_, live_;
};

}  // namespace fastdeploy_rl
