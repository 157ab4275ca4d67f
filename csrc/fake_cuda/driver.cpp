// FakeCuda: the CUDA driver calls that fastdeploy_rl uses, over shared memory, for real processes without a GPU.
//
// It keeps the driver's rules, so that a test which passes here has not broken them: a context must be current; a
// handle names an allocation and is given for its base only; the process that exported may not open
// (CUDA_ERROR_INVALID_CONTEXT); opening twice in one context counts and gives the same pointer (CUDA Driver API,
// cuIpcOpenMemHandle); what was opened cannot be exported again; the last release of a primary context takes its
// memory along; CUDA_VISIBLE_DEVICES ends at its first entry that names no device. Freeing memory that others have
// open is undefined there; here it is counted, and the bytes are overwritten.
// Not modelled: streams, kernels, peer access between devices, suballocation of small blocks.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "state.h"

using namespace fake_cuda;

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kPeerAccessUnsupported = 217,
};

struct ResultText {
  int code;
  const char* name;
  const char* text;
};

constexpr ResultText kTexts[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
};

constexpr int kBufferId = 7;
constexpr int kDeviceOrdinal = 9;
constexpr int kIsIpcCapable = 10;
constexpr unsigned kLazyEnablePeerAccess = 1;
constexpr int kVersion = 12040;
constexpr int kPoison = 0xDB;
constexpr int kOrdinalBits = 8;

using Pointer = uint64_t;

struct Context {
  int ordinal;
  int references;
};

// A run of addresses of this process.
struct Range {
  uint64_t id;
  size_t num_bytes;
  int ordinal;
  int opened;  // How often it was opened; 0: it is our own allocation.
};

struct Handle {
  uint64_t magic;
  uint64_t id;
  Owner owner;
  uint8_t padding[32];
};
static_assert(sizeof(Handle) == 64, "as CUipcMemHandle");

bool is_prefix(const std::string& text, const uint8_t* uuid, const char* kind) {
  static const char kDigits[] = "0123456789abcdef";
  std::string whole = kind;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) whole += '-';
    whole += kDigits[uuid[i] >> 4];
    whole += kDigits[uuid[i] & 15];
  }
  std::string wanted = text;
  for (size_t i = 4; i < wanted.size(); ++i) wanted[i] = static_cast<char>(std::tolower(wanted[i]));
  return wanted.size() > 4 && whole.compare(0, wanted.size(), wanted) == 0;
}

// One process's side of the driver.
class Process {
 public:
  static Process& self() {
    static Process process;
    return process;
  }

  std::mutex mutex;
  State* state = nullptr;
  std::string directory;
  std::map<Pointer, Range> ranges;
  Owner owner{};

  int initialise() {
    const char* value = std::getenv("FASTDEPLOY_RL_FAKE_CUDA");
    const std::string wanted = value == nullptr ? "" : value;
    if (state != nullptr && wanted != directory) leave();
    if (state == nullptr && (state = map_state(wanted)) == nullptr) return kNoDevice;
    directory = wanted;
    owner = this_process();
    if (contexts_.empty()) select_devices();
    return contexts_.empty() ? kNoDevice : kSuccess;
  }

  // What cuDeviceGet gives: a test may use one machine after another in its own process, and what is left of the one
  // must not touch the other.
  int device_of(int ordinal) const { return generation_ << kOrdinalBits | ordinal; }

  // -1: no device of this machine.
  int ordinal_of(int device) const {
    const int ordinal = device & ((1 << kOrdinalBits) - 1);
    return device == device_of(ordinal) && ordinal < num_devices() ? ordinal : -1;
  }

  int num_devices() const { return static_cast<int>(contexts_.size()); }
  const Device& device(int ordinal) const { return state->devices[physical(ordinal)]; }
  int physical(int ordinal) const { return physical_[static_cast<size_t>(ordinal)]; }
  Context* primary(int ordinal) { return contexts_[static_cast<size_t>(ordinal)]; }

  std::map<Pointer, Range>::iterator find(Pointer pointer) {
    auto after = ranges.upper_bound(pointer);
    if (after == ranges.begin()) return ranges.end();
    auto found = std::prev(after);
    return pointer < found->first + found->second.num_bytes ? found : ranges.end();
  }

  bool covers(Pointer pointer, size_t num_bytes) {
    const auto found = find(pointer);
    return found != ranges.end() && num_bytes <= found->first + found->second.num_bytes - pointer;
  }

  int map(uint64_t id, size_t num_bytes, int ordinal, int flags, int opened, Pointer* pointer) {
    const int fd = open(file_of(directory, id).c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return kInvalidValue;
    const bool has_room = (flags & O_CREAT) == 0 || posix_fallocate(fd, 0, static_cast<off_t>(num_bytes)) == 0;
    void* data = has_room ? mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (data == MAP_FAILED) return kOutOfMemory;
    *pointer = reinterpret_cast<Pointer>(data);
    ranges[*pointer] = {id, num_bytes, ordinal, opened};
    return kSuccess;
  }

  // Both under the lock of the state.
  void free(std::map<Pointer, Range>::iterator range) {
    const uint64_t id = range->second.id;
    if (count_openings(state, id) != 0) {
      ++state->counters[kFreesWhileOpen];
      std::memset(reinterpret_cast<void*>(range->first), kPoison, range->second.num_bytes);
    }
    unlink(file_of(directory, id).c_str());
    if (Allocation* allocation = find_allocation(state, id)) allocation->id = 0;
    unmap(range);
  }

  void close_opening(std::map<Pointer, Range>::iterator range) {
    for (Opening& opening : state->openings) {
      if (opening.id == range->second.id && opening.owner == owner) opening.id = 0;
    }
    unmap(range);
  }

  void drop_memory_of(int ordinal) {
    const Lock lock(state);
    sweep(state, directory);
    for (auto range = ranges.begin(); range != ranges.end();) {
      const auto next = std::next(range);
      if (range->second.ordinal == ordinal && range->second.opened == 0)
        free(range);
      else if (range->second.ordinal == ordinal)
        close_opening(range);
      range = next;
    }
  }

 private:
  void unmap(std::map<Pointer, Range>::iterator range) {
    munmap(reinterpret_cast<void*>(range->first), range->second.num_bytes);
    ranges.erase(range);
  }

  void leave() {
    for (int ordinal = 0; ordinal < num_devices(); ++ordinal) {
      drop_memory_of(ordinal);
      primary(ordinal)->references = 0;
    }
    ++generation_;
    unmap_state(state);
    state = nullptr;
    contexts_.clear();
    physical_.clear();
  }

  void select_devices() {
    const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
    if (value == nullptr) {
      for (int i = 0; i < state->num_devices; ++i) add(i);
      return;
    }
    std::string text = value;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      if (!add(named(text.substr(begin, end - begin)))) return;
      begin = end + 1;
    }
  }

  int named(const std::string& text) const {
    const bool is_index = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
    if (is_index) return std::atoi(text.c_str());
    int found = -1;
    for (int i = 0; i < state->num_devices; ++i) {
      const Device& device = state->devices[i];
      const bool is_mig = std::memcmp(device.gpu_uuid, device.uuid, 16) != 0;
      if (!is_prefix(text, device.uuid, is_mig ? "MIG-" : "GPU-")) continue;
      if (found >= 0) return -1;
      found = i;
    }
    return found;
  }

  bool add(int device) {
    if (device < 0 || device >= state->num_devices) return false;
    for (const int known : physical_) {
      if (known == device) return false;
    }
    physical_.push_back(device);
    // Never freed: whoever still has the pointer meets a context without references, not foreign memory.
    contexts_.push_back(new Context{num_devices(), 0});
    return true;
  }

  int generation_ = 0;
  std::vector<Context*> contexts_;
  std::vector<int> physical_;
};

thread_local std::vector<Context*> stack;

Context* current() { return stack.empty() || stack.back()->references == 0 ? nullptr : stack.back(); }

// Runs `body(process)` with this process's side locked, where the driver was initialised.
template <typename Body>
int call(Body body) {
  Process& process = Process::self();
  const std::lock_guard<std::mutex> guard(process.mutex);
  return process.state == nullptr ? kNotInitialized : body(process);
}

// As `call`, and a context must be current.
template <typename Body>
int call_in_context(Body body) {
  return call([&](Process& process) {
    Context* context = current();
    return context == nullptr ? kInvalidContext : body(process, *context);
  });
}

template <typename Body>
int call_on_device(int device, Body body) {
  return call([&](Process& process) {
    const int ordinal = process.ordinal_of(device);
    return ordinal < 0 ? kInvalidDevice : body(process, ordinal);
  });
}

const ResultText* text_of(int code) {
  for (const ResultText& text : kTexts) {
    if (text.code == code) return &text;
  }
  return nullptr;
}

uint64_t bytes_on_device(const State* state, int device) {
  uint64_t num_bytes = 0;
  for (const Allocation& allocation : state->allocations) {
    if (allocation.id != 0 && allocation.device == device) num_bytes += allocation.num_bytes;
  }
  return num_bytes;
}

template <typename Row, size_t N>
Row* free_row(Row (&rows)[N]) {
  for (Row& row : rows) {
    if (row.id == 0) return &row;
  }
  return nullptr;
}

int allocate(Process& process, const Context& context, size_t num_bytes, Pointer* pointer) {
  State* state = process.state;
  const Lock lock(state);
  sweep(state, process.directory);
  const int device = process.physical(context.ordinal);
  Allocation* row = free_row(state->allocations);
  if (row == nullptr || num_bytes > process.device(context.ordinal).num_bytes - bytes_on_device(state, device)) {
    return kOutOfMemory;
  }
  const uint64_t id = ++state->last_id;
  const int result = process.map(id, num_bytes, context.ordinal, O_CREAT | O_EXCL, 0, pointer);
  if (result != kSuccess) {
    unlink(file_of(process.directory, id).c_str());
    return result;
  }
  *row = {id, num_bytes, device, process.owner};
  ++state->counters[kAllocations];
  return kSuccess;
}

int open_handle(Process& process, const Context& context, const Handle& handle, Pointer* pointer) {
  State* state = process.state;
  if (handle.magic != kMagic) return kInvalidValue;
  if (handle.owner == process.owner) return kInvalidContext;
  const Lock lock(state);
  sweep(state, process.directory);
  const Allocation* allocation = find_allocation(state, handle.id);
  if (allocation == nullptr) return kInvalidValue;
  if (allocation->device != process.physical(context.ordinal)) return kPeerAccessUnsupported;
  for (auto& [address, range] : process.ranges) {
    if (range.id != handle.id) continue;
    ++range.opened;
    ++state->counters[kOpens];
    *pointer = address;
    return kSuccess;
  }
  Opening* row = free_row(state->openings);
  if (row == nullptr) return kOutOfMemory;
  const int result = process.map(handle.id, allocation->num_bytes, context.ordinal, 0, 1, pointer);
  if (result != kSuccess) return result;
  *row = {handle.id, process.owner};
  ++state->counters[kOpens];
  return kSuccess;
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) {
  Process& process = Process::self();
  const std::lock_guard<std::mutex> guard(process.mutex);
  return flags != 0 ? kInvalidValue : process.initialise();
}

int cuDriverGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

int cuGetErrorName(int error, const char** text) {
  const ResultText* found = text_of(error);
  *text = found == nullptr ? nullptr : found->name;
  return found == nullptr ? kInvalidValue : kSuccess;
}

int cuGetErrorString(int error, const char** text) {
  const ResultText* found = text_of(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? kInvalidValue : kSuccess;
}

int cuDeviceGetCount(int* count) {
  return call([&](Process& process) {
    *count = process.num_devices();
    return kSuccess;
  });
}

int cuDeviceGet(int* device, int ordinal) {
  return call([&](Process& process) {
    if (ordinal < 0 || ordinal >= process.num_devices()) return kInvalidDevice;
    *device = process.device_of(ordinal);
    return kSuccess;
  });
}

int cuDeviceGetName(char* name, int length, int device) {
  return call_on_device(device, [&](Process& process, int ordinal) {
    if (length <= 0) return kInvalidValue;
    std::strncpy(name, process.device(ordinal).name, static_cast<size_t>(length) - 1);
    name[length - 1] = '\0';
    return kSuccess;
  });
}

int cuDeviceGetUuid(uint8_t* uuid, int device) {
  return call_on_device(device, [&](Process& process, int ordinal) {
    std::memcpy(uuid, process.device(ordinal).gpu_uuid, 16);
    return kSuccess;
  });
}

int cuDeviceGetUuid_v2(uint8_t* uuid, int device) {
  return call_on_device(device, [&](Process& process, int ordinal) {
    std::memcpy(uuid, process.device(ordinal).uuid, 16);
    return kSuccess;
  });
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  return call_on_device(device, [&](Process& process, int ordinal) {
    ++process.primary(ordinal)->references;
    *context = process.primary(ordinal);
    return kSuccess;
  });
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  return call_on_device(device, [&](Process& process, int ordinal) {
    Context* context = process.primary(ordinal);
    if (context->references == 0) return kInvalidContext;
    if (--context->references == 0) process.drop_memory_of(ordinal);
    return kSuccess;
  });
}

int cuCtxPushCurrent_v2(void* context) {
  return call([&](Process&) {
    if (context == nullptr || static_cast<Context*>(context)->references == 0) return kInvalidContext;
    stack.push_back(static_cast<Context*>(context));
    return kSuccess;
  });
}

int cuCtxPopCurrent_v2(void** context) {
  return call([&](Process&) {
    if (stack.empty()) return kInvalidContext;
    *context = stack.back();
    stack.pop_back();
    return kSuccess;
  });
}

int cuCtxSynchronize() {
  return call_in_context([](Process&, Context&) { return kSuccess; });
}

int cuMemAlloc_v2(Pointer* pointer, size_t num_bytes) {
  return call_in_context([&](Process& process, Context& context) {
    return num_bytes == 0 ? kInvalidValue : allocate(process, context, num_bytes, pointer);
  });
}

int cuMemFree_v2(Pointer pointer) {
  return call_in_context([&](Process& process, Context&) {
    const auto found = process.ranges.find(pointer);
    if (found == process.ranges.end() || found->second.opened != 0) return kInvalidValue;
    const Lock lock(process.state);
    sweep(process.state, process.directory);
    process.free(found);
    ++process.state->counters[kFrees];
    return kSuccess;
  });
}

int cuMemGetAddressRange_v2(Pointer* base, size_t* num_bytes, Pointer pointer) {
  return call_in_context([&](Process& process, Context&) {
    const auto found = process.find(pointer);
    if (found == process.ranges.end()) return kInvalidValue;
    *base = found->first;
    *num_bytes = found->second.num_bytes;
    return kSuccess;
  });
}

int cuPointerGetAttribute(void* data, int attribute, Pointer pointer) {
  return call_in_context([&](Process& process, Context&) {
    const auto found = process.find(pointer);
    if (found == process.ranges.end()) return kInvalidValue;
    if (attribute == kBufferId) {
      *static_cast<unsigned long long*>(data) = found->second.id;
    } else if (attribute == kDeviceOrdinal) {
      *static_cast<int*>(data) = found->second.ordinal;
    } else if (attribute == kIsIpcCapable) {
      *static_cast<bool*>(data) = found->second.opened == 0;
    } else {
      return kInvalidValue;
    }
    return kSuccess;
  });
}

int cuIpcGetMemHandle(Handle* handle, Pointer pointer) {
  return call_in_context([&](Process& process, Context&) {
    const auto found = process.ranges.find(pointer);
    if (found == process.ranges.end() || found->second.opened != 0) return kInvalidValue;
    *handle = {kMagic, found->second.id, process.owner, {}};
    const Lock lock(process.state);
    ++process.state->counters[kExports];
    return kSuccess;
  });
}

int cuIpcOpenMemHandle_v2(Pointer* pointer, Handle handle, unsigned flags) {
  return call_in_context([&](Process& process, Context& context) {
    return flags != kLazyEnablePeerAccess ? kInvalidValue : open_handle(process, context, handle, pointer);
  });
}

int cuIpcCloseMemHandle(Pointer pointer) {
  return call_in_context([&](Process& process, Context&) {
    const auto found = process.ranges.find(pointer);
    if (found == process.ranges.end() || found->second.opened == 0) return kInvalidValue;
    const Lock lock(process.state);
    ++process.state->counters[kCloses];
    if (--found->second.opened == 0) process.close_opening(found);
    return kSuccess;
  });
}

int cuMemcpyHtoD_v2(Pointer target, const void* source, size_t num_bytes) {
  return call_in_context([&](Process& process, Context&) {
    if (!process.covers(target, num_bytes)) return kInvalidValue;
    std::memcpy(reinterpret_cast<void*>(target), source, num_bytes);
    return kSuccess;
  });
}

int cuMemcpyDtoH_v2(void* target, Pointer source, size_t num_bytes) {
  return call_in_context([&](Process& process, Context&) {
    if (!process.covers(source, num_bytes)) return kInvalidValue;
    std::memcpy(target, reinterpret_cast<const void*>(source), num_bytes);
    return kSuccess;
  });
}

int cuMemcpyDtoD_v2(Pointer target, Pointer source, size_t num_bytes) {
  return call_in_context([&](Process& process, Context&) {
    if (!process.covers(target, num_bytes) || !process.covers(source, num_bytes)) return kInvalidValue;
    std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), num_bytes);
    return kSuccess;
  });
}

}  // extern "C"
