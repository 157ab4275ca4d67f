// Processes that meet in one shared mapping: barrier, all_reduce, all_gather, broadcast, with deadlines.
//
// Everybody passes one gate, a 64-bit word that holds (generation, who arrived, broken, step). The last to arrive opens
// the next step. Slots are doubled by the parity of the step: a slot is written again two steps later, and the gate in
// between proves that everybody has read it. They are doubled again by the parity of the generation, so that a process
// that was stopped in the middle of a copy and wakes in a later generation cannot write into what that one exchanges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "mapping.h"

namespace fastdeploy_rl {

struct MissingRanks {
  std::string what;
  std::vector<int> ranks;
  uint64_t generation;
};

struct CollectiveHeader;

class CollectiveGroup {
 public:
  // `on_signal` is called when a signal cut a wait short; what it throws breaks the group and comes through.
  CollectiveGroup(std::shared_ptr<Mapping> mapping, int64_t rank, int64_t num_ranks, int64_t slot_bytes,
                  int64_t generation, void (*on_signal)());
  static size_t required_bytes(int64_t num_ranks, int64_t slot_bytes);
  // From outside the group: every call of a generation before this one ends as broken, also those that wait now.
  static void advance(const Mapping& mapping, int64_t num_ranks, int64_t slot_bytes, int64_t generation);

  void barrier(int64_t deadline_ns);
  void all_reduce(float* values, size_t num_values, int64_t deadline_ns);
  void all_gather(const uint8_t* own, size_t num_bytes, uint8_t* gathered, int64_t deadline_ns);
  void broadcast(uint8_t* values, size_t num_bytes, int64_t root, int64_t deadline_ns);

  int num_ranks() const { return num_ranks_; }

 private:
  enum class Call : uint8_t { barrier = 1, all_reduce, all_gather, broadcast };
  struct Request {
    Call call;
    uint64_t num_bytes;
    int root;
    int64_t deadline_ns;
  };

  void join();
  void check_current(const Request& request) const;
  size_t bank() const;
  uint8_t* slot(size_t bank, int rank) const;
  template <typename Write, typename Read>
  void exchange(const Request& request, Write write, Read read);
  void meet(const Request& request);
  void arrive(const Request& request);
  void await_step(const Request& request);
  bool has_passed(uint64_t& gate) const;
  bool spin(uint64_t& gate) const;
  void sleep(uint64_t gate, const Request& request);
  void break_step(uint64_t gate, const Request& request);
  void leave();
  void check_agreement(const Request& request, size_t bank) const;
  [[noreturn]] void raise_missing(uint64_t gate, const Request& request) const;

  Pin pin_;
  CollectiveHeader* header_;
  uint8_t* slots_;
  int rank_;
  int num_ranks_;
  size_t slot_bytes_;
  uint64_t generation_;
  void (*on_signal_)();
  uint32_t step_ = 0;
  bool has_core_;
  std::atomic<bool> is_busy_{false};

  class Turn;
};

}  // namespace fastdeploy_rl
