#include "state.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

namespace fake_cuda {

namespace {

constexpr int kStartTicksField = 20;  // Of /proc/PID/stat, counted from the state that follows the name.

uint64_t start_ticks_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return 0;
  std::istringstream fields(text.substr(end_of_name + 1));
  std::string field;
  for (int i = 0; i < kStartTicksField && fields >> field; ++i) {
    if (i == 0 && (field == "Z" || field == "X")) return 0;  // A zombie has given everything back.
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

// Asks about each process once.
class Living {
 public:
  bool has(const Owner& owner) {
    auto found = start_ticks_.find(owner.pid);
    if (found == start_ticks_.end()) found = start_ticks_.emplace(owner.pid, start_ticks_of(owner.pid)).first;
    return found->second == owner.start_ticks;
  }

 private:
  std::map<int64_t, uint64_t> start_ticks_;
};

std::string state_path(const std::string& directory) { return directory + "/state"; }

State* map_file(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  struct stat status{};
  bool has_size = false;
  if ((flags & O_CREAT) != 0) {
    errno = posix_fallocate(fd, 0, sizeof(State));  // it does not set errno itself
    has_size = errno == 0;
  } else {
    has_size = fstat(fd, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(State));
  }
  void* data = has_size ? mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  return data == MAP_FAILED ? nullptr : static_cast<State*>(data);
}

void make_mutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

}  // namespace

State* map_state(const std::string& directory) {
  State* state = map_file(state_path(directory), 0);
  if (state != nullptr && state->magic == kMagic) return state;
  if (state != nullptr) unmap_state(state);
  return nullptr;
}

void unmap_state(State* state) { munmap(state, sizeof(State)); }

Lock::Lock(State* state) : state_(state) {
  // Each change of a table is one store of an id, so that a dead holder leaves nothing half done.
  if (pthread_mutex_lock(&state->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state->mutex);
}

Lock::~Lock() { pthread_mutex_unlock(&state_->mutex); }

Owner this_process() { return {getpid(), start_ticks_of(getpid())}; }

std::string file_of(const std::string& directory, uint64_t id) { return directory + "/" + std::to_string(id); }

void sweep(State* state, const std::string& directory) {
  Living living;
  for (Opening& opening : state->openings) {
    if (opening.id != 0 && !living.has(opening.owner)) opening.id = 0;
  }
  for (Allocation& allocation : state->allocations) {
    if (allocation.id == 0 || living.has(allocation.owner)) continue;
    unlink(file_of(directory, allocation.id).c_str());
    allocation.id = 0;
  }
}

Allocation* find_allocation(State* state, uint64_t id) {
  for (Allocation& allocation : state->allocations) {
    if (id != 0 && allocation.id == id) return &allocation;
  }
  return nullptr;
}

int64_t count_openings(const State* state, uint64_t id) {
  int64_t count = 0;
  for (const Opening& opening : state->openings) count += opening.id == id ? 1 : 0;
  return count;
}

}  // namespace fake_cuda

using namespace fake_cuda;

// --- for tests: what fastdeploy_rl.testing.fake_cuda calls ---

extern "C" int fake_cuda_create(const char* directory, const Device* devices, int num_devices) {
  if (num_devices < 0 || num_devices > kMaxDevices) return EINVAL;
  State* state = map_file(state_path(directory), O_CREAT | O_EXCL);
  if (state == nullptr) return errno;
  make_mutex(&state->mutex);
  state->num_devices = num_devices;
  for (int i = 0; i < num_devices; ++i) state->devices[i] = devices[i];
  state->magic = kMagic;
  unmap_state(state);
  return 0;
}

// `values`: the counters, then the allocations and the openings that live.
extern "C" int fake_cuda_read(const char* directory, uint64_t* values) {
  State* state = map_state(directory);
  if (state == nullptr) return ENOENT;
  {
    const Lock lock(state);
    sweep(state, directory);
    std::memcpy(values, state->counters, sizeof(state->counters));
    values[kNumCounters] = values[kNumCounters + 1] = 0;
    for (const Allocation& allocation : state->allocations) values[kNumCounters] += allocation.id != 0 ? 1 : 0;
    for (const Opening& opening : state->openings) values[kNumCounters + 1] += opening.id != 0 ? 1 : 0;
  }
  unmap_state(state);
  return 0;
}
