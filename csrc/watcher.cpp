#include "watcher.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "threads.h"
#include "words.h"

namespace fastdeploy_rl {

namespace {

constexpr int64_t kMaxPeriodUs = 1'000'000;
constexpr int64_t kStopRetryNs = 200'000;

int64_t checked_period_ns(int64_t period_us) {
  if (period_us < 1 || period_us > kMaxPeriodUs) {
    throw std::invalid_argument("period_us must be in 1.." + std::to_string(kMaxPeriodUs) + ", got " +
                                std::to_string(period_us));
  }
  return period_us * 1000;
}

}  // namespace

WordWatcher::WordWatcher(std::shared_ptr<Mapping> word, int64_t word_offset, std::shared_ptr<Mapping> bell,
                         int64_t bell_offset, int64_t period_us)
    : word_pin_(std::in_place, std::move(word)),
      bell_pin_(std::in_place, std::move(bell)),
      word_(reinterpret_cast<int32_t*>((**word_pin_).at(word_offset, 4, 4, Access::read))),
      bell_(reinterpret_cast<int32_t*>((**bell_pin_).at(bell_offset, 4, 4, Access::write))),
      period_ns_(checked_period_ns(period_us)),
      seen_(load(word_)) {  // Seen by the constructor: a store right after it is a change already.
  thread_ = start_quiet_thread([this] { watch(); });
}

WordWatcher::~WordWatcher() { stop(); }

void WordWatcher::watch() {
  while (!is_stopping_.load()) {
    futex_wait(word_, seen_, monotonic_ns() + period_ns_);
    const int32_t now = load(word_);
    if (now == seen_) continue;
    seen_ = now;
    ring_bell(bell_);
  }
  ring_bell(&is_done_);
}

void WordWatcher::stop() {
  if (!thread_.joinable()) return;
  is_stopping_.store(true);
  // The thread may be between its look at the flag and its sleep, so one wake is not enough.
  do {
    futex_wake(word_);
  } while (futex_wait(&is_done_, 0, monotonic_ns() + kStopRetryNs) != Wake::changed);
  thread_.join();
  word_pin_.reset();
  bell_pin_.reset();
}

}  // namespace fastdeploy_rl
