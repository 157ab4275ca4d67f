// A thread that turns silent changes of a foreign word into rings of a bell.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "mapping.h"

namespace fastdeploy_rl {

class WordWatcher {
 public:
  WordWatcher(std::shared_ptr<Mapping> word, int64_t word_offset, std::shared_ptr<Mapping> bell, int64_t bell_offset,
              int64_t period_us);
  ~WordWatcher();
  WordWatcher(const WordWatcher&) = delete;
  WordWatcher& operator=(const WordWatcher&) = delete;

  // Ends and joins the thread and lets go of the mappings. Needs no interpreter lock.
  void stop();

 private:
  void watch();

  std::optional<Pin> word_pin_;
  std::optional<Pin> bell_pin_;
  const int32_t* word_;
  int32_t* bell_;
  int64_t period_ns_;
  int32_t seen_;
  std::atomic<bool> is_stopping_{false};
  int32_t is_done_ = 0;  // A futex of our own: the thread's last sign.
  std::thread thread_;
};

}  // namespace fastdeploy_rl
