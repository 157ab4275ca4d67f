#include "words.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

namespace fastdeploy_rl {

namespace {

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr int64_t kLookAtSignalsNs = 100'000'000;

static_assert(sizeof(int32_t) == 4 && alignof(int32_t) == 4, "a futex is an aligned 32-bit word");

}  // namespace

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNanosecondsPerSecond + now.tv_nsec;
}

Wake futex_wait(const int32_t* word, int32_t expected, int64_t deadline_ns) {
  const int64_t look_ns = monotonic_ns() + kLookAtSignalsNs;
  const int64_t end_ns = std::max<int64_t>(std::min(deadline_ns, look_ns), 0);
  timespec until{};
  until.tv_sec = end_ns / kNanosecondsPerSecond;
  until.tv_nsec = end_ns % kNanosecondsPerSecond;
  while (load(word) == expected) {
    // WAIT_BITSET is the form that takes an absolute CLOCK_MONOTONIC time. Not PRIVATE: waiters live in other
    // processes.
    const long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (rc == 0 || errno == EAGAIN) continue;
    if (errno == EINTR) return Wake::interrupted;
    if (errno == ETIMEDOUT) {
      if (load(word) != expected) return Wake::changed;
      return end_ns == look_ns ? Wake::interrupted : Wake::timed_out;
    }
    throw std::system_error(errno, std::system_category(), "futex wait");
  }
  return Wake::changed;
}

int futex_wake(const int32_t* word) {
  const long woken = syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  if (woken < 0) throw std::system_error(errno, std::system_category(), "futex wake");
  return static_cast<int>(woken);
}

void ring_bell(int32_t* word) {
  __atomic_add_fetch(reinterpret_cast<uint32_t*>(word), 1u, __ATOMIC_SEQ_CST);
  futex_wake(word);
}

}  // namespace fastdeploy_rl
