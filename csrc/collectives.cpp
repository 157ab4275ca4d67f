#include "collectives.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "words.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdeploy_rl {

namespace {

constexpr int64_t kMaxRanks = 16;
constexpr int64_t kMaxGeneration = 0xffff;
constexpr int64_t kMaxSlotBytes = int64_t{1} << 32;
constexpr size_t kLineBytes = 64;
constexpr int64_t kSpinNs = 50'000;
constexpr int kLooksPerYield = 32;

// The gate: bits 0..30 step, bit 31 broken, bits 32..47 who arrived at the step, bits 48..63 generation.
constexpr uint64_t kStepMask = 0x7fffffff;
constexpr uint64_t kBroken = uint64_t{1} << 31;

uint32_t step_of(uint64_t gate) { return static_cast<uint32_t>(gate & kStepMask); }
uint32_t next_step(uint32_t step) { return static_cast<uint32_t>((step + 1) & kStepMask); }
uint64_t arrived_of(uint64_t gate) { return gate >> 32 & 0xffff; }
uint64_t generation_of(uint64_t gate) { return gate >> 48; }
bool is_broken(uint64_t gate) { return (gate & kBroken) != 0; }
uint64_t arrival_of(int rank) { return uint64_t{1} << (32 + rank); }
uint64_t open_gate(uint64_t generation, uint32_t step) { return generation << 48 | step; }

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

int num_usable_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void check_sizes(int64_t num_ranks, int64_t slot_bytes) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw std::invalid_argument("num_ranks must be in 1.." + std::to_string(kMaxRanks) + ", got " +
                                std::to_string(num_ranks));
  }
  if (slot_bytes < static_cast<int64_t>(kLineBytes) || slot_bytes > kMaxSlotBytes) {
    throw std::invalid_argument("slot_bytes must be in 64..2^32, got " + std::to_string(slot_bytes));
  }
}

// In the order of ranks on every rank: the sum is bitwise the same everywhere.
void add(float* sum, const float* term, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += term[i];
}

const char* const kCallNames[] = {"?", "barrier", "all_reduce", "all_gather", "broadcast"};

}  // namespace

// One cache line a rank, written by that rank alone.
struct alignas(kLineBytes) RankLine {
  uint64_t joined;    // The last generation this rank made a group of.
  uint64_t calls[4];  // What it calls, by parity of generation and step: call, root and size.
};

struct CollectiveHeader {
  uint64_t config;
  alignas(kLineBytes) std::atomic<uint64_t> gate;
  std::atomic<int32_t> num_sleepers;
  RankLine ranks[kMaxRanks];
};

static_assert(sizeof(std::atomic<uint64_t>) == 8 && std::atomic<uint64_t>::is_always_lock_free, "shared by processes");
static_assert(sizeof(RankLine) == kLineBytes);
static_assert(offsetof(CollectiveHeader, gate) == 64 && offsetof(CollectiveHeader, ranks) == 128);

namespace {

constexpr size_t kHeaderBytes = 4096;
static_assert(sizeof(CollectiveHeader) <= kHeaderBytes);

// Sleepers wait on the half of the gate that changes when a step opens or breaks, not when one more rank arrives.
const int32_t* sleeping_word(const CollectiveHeader* header) { return reinterpret_cast<const int32_t*>(&header->gate); }

void wake_sleepers(const CollectiveHeader* header) {
  if (header->num_sleepers.load() > 0) futex_wake(sleeping_word(header));
}

class Sleeper {
 public:
  explicit Sleeper(CollectiveHeader* header) : header_(header) { ++header_->num_sleepers; }
  ~Sleeper() { --header_->num_sleepers; }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  CollectiveHeader* header_;
};

}  // namespace

// One call at a time: two threads in one group would mix their steps.
class CollectiveGroup::Turn {
 public:
  explicit Turn(CollectiveGroup& group) : group_(group) {
    if (group_.is_busy_.exchange(true)) throw std::runtime_error("another thread is inside a call of this group");
  }
  ~Turn() { group_.is_busy_.store(false); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  CollectiveGroup& group_;
};

size_t CollectiveGroup::required_bytes(int64_t num_ranks, int64_t slot_bytes) {
  check_sizes(num_ranks, slot_bytes);
  return kHeaderBytes + 4 * static_cast<size_t>(num_ranks) * round_up(static_cast<size_t>(slot_bytes), kLineBytes);
}

namespace {

CollectiveHeader* header_in(const Mapping& mapping, int64_t num_ranks, int64_t slot_bytes) {
  const size_t num_bytes = CollectiveGroup::required_bytes(num_ranks, slot_bytes);
  auto* header = reinterpret_cast<CollectiveHeader*>(mapping.at(0, num_bytes, kLineBytes, Access::write));
  const uint64_t config = round_up(static_cast<size_t>(slot_bytes), kLineBytes) << 8 | static_cast<uint64_t>(num_ranks);
  uint64_t found = 0;
  if (!__atomic_compare_exchange_n(&header->config, &found, config, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) &&
      found != config) {
    throw std::invalid_argument("the mapping belongs to a group of " + std::to_string(found & 0xff) +
                                " ranks and slots of " + std::to_string(found >> 8) + " bytes");
  }
  return header;
}

// The step always moves on, so that sleepers of the older generation see their word change.
uint64_t raise_gate(CollectiveHeader* header, uint64_t generation) {
  uint64_t gate = header->gate.load();
  while (generation_of(gate) < generation) {
    if (!header->gate.compare_exchange_weak(gate, open_gate(generation, next_step(step_of(gate))))) continue;
    wake_sleepers(header);
    gate = header->gate.load();
  }
  return gate;
}

void check_generation(int64_t generation) {
  if (generation >= 1 && generation <= kMaxGeneration) return;
  throw std::invalid_argument("generation must be in 1.." + std::to_string(kMaxGeneration) + ", got " +
                              std::to_string(generation));
}

}  // namespace

CollectiveGroup::CollectiveGroup(std::shared_ptr<Mapping> mapping, int64_t rank, int64_t num_ranks, int64_t slot_bytes,
                                 int64_t generation, void (*on_signal)())
    : pin_(std::move(mapping)),
      header_(header_in(*pin_, num_ranks, slot_bytes)),
      slots_(reinterpret_cast<uint8_t*>(header_) + kHeaderBytes),
      rank_(static_cast<int>(rank)),
      num_ranks_(static_cast<int>(num_ranks)),
      slot_bytes_(round_up(static_cast<size_t>(slot_bytes), kLineBytes)),
      generation_(static_cast<uint64_t>(generation)),
      on_signal_(on_signal),
      has_core_(num_ranks <= num_usable_cpus()) {
  if (rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
  }
  check_generation(generation);
  join();
}

void CollectiveGroup::advance(const Mapping& mapping, int64_t num_ranks, int64_t slot_bytes, int64_t generation) {
  check_generation(generation);
  raise_gate(header_in(mapping, num_ranks, slot_bytes), static_cast<uint64_t>(generation));
}

void CollectiveGroup::join() {
  uint64_t* joined = &header_->ranks[rank_].joined;
  uint64_t before = __atomic_load_n(joined, __ATOMIC_SEQ_CST);
  const uint64_t gate = header_->gate.load();
  if (generation_of(gate) > generation_) {
    throw MissingRanks{"generation " + std::to_string(generation_) + " cannot be joined: the group is at generation " +
                           std::to_string(generation_of(gate)),
                       {},
                       generation_};
  }
  if (before >= generation_ ||
      !__atomic_compare_exchange_n(joined, &before, generation_, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    throw std::invalid_argument("generation " + std::to_string(generation_) + " is not new: rank " +
                                std::to_string(rank_) + " joined " + std::to_string(before));
  }
  // No step of our generation opens before we arrive at this one.
  step_ = step_of(raise_gate(header_, generation_));
}

size_t CollectiveGroup::bank() const { return (generation_ & 1) * 2 + (step_ & 1); }

uint8_t* CollectiveGroup::slot(size_t bank, int rank) const {
  return slots_ + (bank * static_cast<size_t>(num_ranks_) + static_cast<size_t>(rank)) * slot_bytes_;
}

void CollectiveGroup::check_current(const Request& request) const {
  const uint64_t gate = header_->gate.load();
  if (generation_of(gate) != generation_ || is_broken(gate) || step_of(gate) != step_) raise_missing(gate, request);
}

void CollectiveGroup::raise_missing(uint64_t gate, const Request& request) const {
  const std::string call = kCallNames[static_cast<int>(request.call)];
  if (generation_of(gate) != generation_) {
    throw MissingRanks{call + " of generation " + std::to_string(generation_) + ": the group is at generation " +
                           std::to_string(generation_of(gate)),
                       {},
                       generation_};
  }
  MissingRanks missing{
      call + " of rank " + std::to_string(rank_) + " at step " + std::to_string(step_), {}, generation_};
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if ((arrived_of(gate) >> rank & 1) == 0) missing.ranks.push_back(rank);
  }
  throw missing;
}

void CollectiveGroup::arrive(const Request& request) {
  const uint64_t all = (uint64_t{1} << num_ranks_) - 1;
  uint64_t gate = header_->gate.load();
  for (;;) {
    if (generation_of(gate) != generation_ || is_broken(gate) || step_of(gate) != step_) raise_missing(gate, request);
    const uint64_t arrived = gate | arrival_of(rank_);
    const bool is_last = arrived_of(arrived) == all;
    const uint64_t desired = is_last ? open_gate(generation_, next_step(step_)) : arrived;
    if (!header_->gate.compare_exchange_weak(gate, desired)) continue;
    if (is_last) wake_sleepers(header_);
    return;
  }
}

// Passed once the gate is no longer closed at our step; `gate` is what was seen last.
bool CollectiveGroup::has_passed(uint64_t& gate) const {
  constexpr uint64_t but_arrivals = ~(uint64_t{0xffff} << 32);
  gate = header_->gate.load();
  return (gate & but_arrivals) != open_gate(generation_, step_);
}

// Looks for a while before it sleeps: to be put to sleep and woken costs more. In between it offers its core to the
// ranks it waits for; all the time where there are more ranks than cores.
bool CollectiveGroup::spin(uint64_t& gate) const {
  if (has_passed(gate)) return true;
  for (const int64_t until = monotonic_ns() + kSpinNs; monotonic_ns() < until;) {
    for (int look = 0; has_core_ && look < kLooksPerYield; ++look) {
      if (has_passed(gate)) return true;
      pause_briefly();
    }
    sched_yield();
    if (has_passed(gate)) return true;
  }
  return false;
}

void CollectiveGroup::await_step(const Request& request) {
  uint64_t gate = 0;
  while (!spin(gate)) sleep(gate, request);
  // One step further, broken or not: ours was complete.
  if (generation_of(gate) != generation_ || step_of(gate) != next_step(step_)) raise_missing(gate, request);
}

void CollectiveGroup::sleep(uint64_t gate, const Request& request) {
  Wake wake;
  {
    const Sleeper sleeper(header_);
    wake = futex_wait(sleeping_word(header_), static_cast<int32_t>(gate & 0xffffffff), request.deadline_ns);
  }
  if (wake == Wake::timed_out) break_step(header_->gate.load(), request);
  if (wake != Wake::interrupted) return;
  try {
    on_signal_();
  } catch (...) {
    leave();
    throw;
  }
}

// The deadline passed: whoever says so first decides, for all ranks, who was missing.
void CollectiveGroup::break_step(uint64_t gate, const Request& request) {
  while (generation_of(gate) == generation_ && step_of(gate) == step_ && !is_broken(gate)) {
    if (!header_->gate.compare_exchange_weak(gate, gate | kBroken)) continue;
    futex_wake(sleeping_word(header_));
    raise_missing(gate | kBroken, request);
  }
}

// This rank goes in the middle of a call: the others must not wait for it to their deadlines.
void CollectiveGroup::leave() {
  uint64_t gate = header_->gate.load();
  while (generation_of(gate) == generation_ && !is_broken(gate)) {
    if (!header_->gate.compare_exchange_weak(gate, (gate & ~arrival_of(rank_)) | kBroken)) continue;
    futex_wake(sleeping_word(header_));
    return;
  }
}

void CollectiveGroup::check_agreement(const Request& request, size_t bank) const {
  const uint64_t own = header_->ranks[rank_].calls[bank];
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const uint64_t other = header_->ranks[rank].calls[bank];
    if (other == own) continue;
    throw std::invalid_argument("rank " + std::to_string(rank) + " calls " + kCallNames[other & 7] + " of " +
                                std::to_string(other >> 8) + " bytes, root " + std::to_string(other >> 3 & 31) +
                                "; rank " + std::to_string(rank_) + " calls " +
                                kCallNames[static_cast<int>(request.call)] + " of " +
                                std::to_string(request.num_bytes) + " bytes, root " + std::to_string(request.root));
  }
}

// What this rank wrote into its slot of the present bank is visible to all afterwards, and theirs to it, until this
// rank has met them once more.
void CollectiveGroup::meet(const Request& request) {
  const size_t met = bank();
  header_->ranks[rank_].calls[met] =
      request.num_bytes << 8 | static_cast<uint64_t>(request.root) << 3 | static_cast<uint64_t>(request.call);
  arrive(request);
  await_step(request);
  step_ = next_step(step_);
  check_agreement(request, met);
}

// A payload in pieces of one slot each, an empty one in one empty piece. `write` fills this rank's slot from the bytes
// at an offset, `read` uses everybody's (a function from rank to slot).
template <typename Write, typename Read>
void CollectiveGroup::exchange(const Request& request, Write write, Read read) {
  const Turn turn(*this);
  size_t offset = 0;
  do {
    const size_t num_bytes = std::min<size_t>(slot_bytes_, request.num_bytes - offset);
    const size_t here = bank();
    check_current(request);
    write(slot(here, rank_), offset, num_bytes);
    meet(request);
    read([&](int rank) { return slot(here, rank); }, offset, num_bytes);
    offset += num_bytes;
  } while (offset < request.num_bytes);
}

void CollectiveGroup::barrier(int64_t deadline_ns) {
  const auto nothing = [](auto&&...) {};
  exchange({Call::barrier, 0, 0, deadline_ns}, nothing, nothing);
}

void CollectiveGroup::all_reduce(float* values, size_t num_values, int64_t deadline_ns) {
  auto* bytes = reinterpret_cast<uint8_t*>(values);
  exchange(
      {Call::all_reduce, num_values * sizeof(float), 0, deadline_ns},
      [&](uint8_t* slot, size_t offset, size_t count) { std::memcpy(slot, bytes + offset, count); },
      [&](auto slot_of, size_t offset, size_t count) {
        std::memcpy(bytes + offset, slot_of(0), count);
        for (int rank = 1; rank < num_ranks_; ++rank) {
          add(values + offset / sizeof(float), reinterpret_cast<const float*>(slot_of(rank)), count / sizeof(float));
        }
      });
}

void CollectiveGroup::all_gather(const uint8_t* own, size_t num_bytes, uint8_t* gathered, int64_t deadline_ns) {
  exchange(
      {Call::all_gather, num_bytes, 0, deadline_ns},
      [&](uint8_t* slot, size_t offset, size_t count) { std::memcpy(slot, own + offset, count); },
      [&](auto slot_of, size_t offset, size_t count) {
        for (int rank = 0; rank < num_ranks_; ++rank) {
          std::memcpy(gathered + static_cast<size_t>(rank) * num_bytes + offset, slot_of(rank), count);
        }
      });
}

void CollectiveGroup::broadcast(uint8_t* values, size_t num_bytes, int64_t root, int64_t deadline_ns) {
  if (root < 0 || root >= num_ranks_) {
    throw std::invalid_argument("root " + std::to_string(root) + " of " + std::to_string(num_ranks_) + " ranks");
  }
  exchange(
      {Call::broadcast, num_bytes, static_cast<int>(root), deadline_ns},
      [&](uint8_t* slot, size_t offset, size_t count) {
        if (rank_ == root) std::memcpy(slot, values + offset, count);
      },
      [&](auto slot_of, size_t offset, size_t count) {
        if (rank_ != root) std::memcpy(values + offset, slot_of(static_cast<int>(root)), count);
      });
}

}  // namespace fastdeploy_rl
