// Words that several processes share: how to sleep on one and how to wake those who sleep.
// Owns the futex calls; knows nothing of mappings or Python. Deadlines are absolute CLOCK_MONOTONIC nanoseconds.
#pragma once

#include <cstdint>

namespace fastdeploy_rl {

enum class Wake { changed, timed_out, interrupted };

int64_t monotonic_ns();

// Sleeps while *word == expected. `changed` only when the word was seen to differ. `interrupted` after a signal, and
// every 100 ms: one that came just before the sleep would otherwise be noticed at the deadline only.
Wake futex_wait(const int32_t* word, int32_t expected, int64_t deadline_ns);

// Wakes all waiters of the word in all processes; returns how many.
int futex_wake(const int32_t* word);

// Adds one (wrapping) and wakes.
void ring_bell(int32_t* word);

inline int32_t load(const int32_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

}  // namespace fastdeploy_rl
