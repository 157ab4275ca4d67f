// What all processes on one FakeCuda share: devices, allocations, who has opened which, counters. One mapped file in a
// directory on tmpfs; the bytes of allocation N lie in the file N beside it.
// Invariant: the tables change under the lock only, and a process that died holding it does not keep it.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_cuda {

constexpr uint64_t kMagic = 0x4144554345'4b4146;  // "FAKECUDA"
constexpr int kMaxDevices = 16;
constexpr int kMaxAllocations = 1024;
constexpr int kMaxOpenings = 4096;

// A process, also after its id was given to another one.
struct Owner {
  int64_t pid;
  uint64_t start_ticks;
  bool operator==(const Owner& other) const { return pid == other.pid && start_ticks == other.start_ticks; }
};

struct Device {
  uint8_t gpu_uuid[16];
  uint8_t uuid[16];  // Of the MIG instance; equal to gpu_uuid where there is none.
  uint64_t num_bytes;
  char name[96];
};

struct Allocation {
  uint64_t id;  // 0: the row is free.
  uint64_t num_bytes;
  int64_t device;
  Owner owner;
};

struct Opening {
  uint64_t id;  // Of the allocation; 0: the row is free.
  Owner owner;
};

// In the order of fastdeploy_rl.testing.fake_cuda.FakeCudaCounters.
enum Counter { kAllocations, kFrees, kExports, kOpens, kCloses, kFreesWhileOpen, kNumCounters };

struct State {
  uint64_t magic;
  pthread_mutex_t mutex;
  int64_t num_devices;
  Device devices[kMaxDevices];
  uint64_t last_id;
  uint64_t counters[kNumCounters];
  Allocation allocations[kMaxAllocations];
  Opening openings[kMaxOpenings];
};

// Maps the state in `directory`; nullptr where there is none.
State* map_state(const std::string& directory);
void unmap_state(State* state);

class Lock {
 public:
  explicit Lock(State* state);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  State* state_;
};

Owner this_process();

// Frees what dead processes had allocated or opened, as the driver does when a process ends.
void sweep(State* state, const std::string& directory);

Allocation* find_allocation(State* state, uint64_t id);
int64_t count_openings(const State* state, uint64_t id);
std::string file_of(const std::string& directory, uint64_t id);

}  // namespace fake_cuda
