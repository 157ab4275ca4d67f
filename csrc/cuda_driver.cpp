#include "cuda_driver.h"

#include <dlfcn.h>

#include <utility>

namespace fastdeploy_rl {

namespace {

constexpr int kUnusable = -1;
constexpr unsigned kLazyEnablePeerAccess = 1;
constexpr int kBufferId = 7;       // CU_POINTER_ATTRIBUTE_BUFFER_ID
constexpr int kDeviceOrdinal = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kIsIpcCapable = 10;  // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
constexpr int kNameBytes = 256;

template <typename Call>
void resolve(void* library, const std::string& path, const char* name, Call& call) {
  call = reinterpret_cast<Call>(dlsym(library, name));
  if (call == nullptr) {
    throw CudaFailure("dlsym", kUnusable, "", path + " has no " + name + ": the driver is too old, or it is none");
  }
}

void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw CudaFailure("dlopen", kUnusable, "", dlerror());
  return library;
}

CudaCalls resolve_all(const std::string& path) {
  void* library = open_library(path);
  CudaCalls calls{};
#define RESOLVE(name) resolve(library, path, #name, calls.name)
  RESOLVE(cuInit);
  RESOLVE(cuDriverGetVersion);
  RESOLVE(cuGetErrorName);
  RESOLVE(cuGetErrorString);
  RESOLVE(cuDeviceGetCount);
  RESOLVE(cuDeviceGet);
  RESOLVE(cuDeviceGetName);
  RESOLVE(cuDeviceGetUuid);
  RESOLVE(cuDeviceGetUuid_v2);
  RESOLVE(cuDevicePrimaryCtxRetain);
  RESOLVE(cuDevicePrimaryCtxRelease_v2);
  RESOLVE(cuCtxPushCurrent_v2);
  RESOLVE(cuCtxPopCurrent_v2);
  RESOLVE(cuCtxSynchronize);
  RESOLVE(cuMemAlloc_v2);
  RESOLVE(cuMemFree_v2);
  RESOLVE(cuMemGetAddressRange_v2);
  RESOLVE(cuPointerGetAttribute);
  RESOLVE(cuIpcGetMemHandle);
  RESOLVE(cuIpcOpenMemHandle_v2);
  RESOLVE(cuIpcCloseMemHandle);
  RESOLVE(cuMemcpyHtoD_v2);
  RESOLVE(cuMemcpyDtoH_v2);
  RESOLVE(cuMemcpyDtoD_v2);
#undef RESOLVE
  return calls;
}

// The context is current on this thread while one of these lives.
class Current {
 public:
  Current(const CudaDriver& driver, void* context) : driver_(driver) {
    driver.check(driver.calls().cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
  }
  ~Current() {
    void* popped = nullptr;
    driver_.calls().cuCtxPopCurrent_v2(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const CudaDriver& driver_;
};

}  // namespace

std::shared_ptr<CudaDriver> CudaDriver::load(const std::string& path) {
  auto driver = std::shared_ptr<CudaDriver>(new CudaDriver());
  driver->calls_ = resolve_all(path);
  driver->check(driver->calls_.cuInit(0), "cuInit");
  return driver;
}

void CudaDriver::check(int code, const char* call) const {
  if (code == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  calls_.cuGetErrorName(code, &name);
  calls_.cuGetErrorString(code, &text);
  throw CudaFailure(call, code, name != nullptr ? name : "", text != nullptr ? text : "unknown error");
}

int CudaDriver::version() const {
  int version = 0;
  check(calls_.cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

int CudaDriver::num_devices() const {
  int count = 0;
  check(calls_.cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

int CudaDriver::device(int ordinal) const {
  int device = 0;
  check(calls_.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

std::string CudaDriver::device_name(int ordinal) const {
  char name[kNameBytes] = "";
  check(calls_.cuDeviceGetName(name, kNameBytes - 1, device(ordinal)), "cuDeviceGetName");
  return name;
}

CudaUuid CudaDriver::device_uuid(int ordinal) const {
  CudaUuid uuid{};
  check(calls_.cuDeviceGetUuid_v2(uuid.data(), device(ordinal)), "cuDeviceGetUuid");
  return uuid;
}

// The older call names the GPU, the newer one the instance.
bool CudaDriver::is_mig(int ordinal) const {
  CudaUuid gpu{};
  check(calls_.cuDeviceGetUuid(gpu.data(), device(ordinal)), "cuDeviceGetUuid");
  return gpu != device_uuid(ordinal) || device_name(ordinal).find(" MIG ") != std::string::npos;
}

std::shared_ptr<CudaContext> CudaContext::retain(std::shared_ptr<CudaDriver> driver, int ordinal) {
  const int device = driver->device(ordinal);
  void* context = nullptr;
  driver->check(driver->calls().cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  return std::shared_ptr<CudaContext>(new CudaContext(std::move(driver), ordinal, device, context));
}

CudaContext::CudaContext(std::shared_ptr<CudaDriver> driver, int ordinal, int device, void* context)
    : driver_(std::move(driver)), ordinal_(ordinal), device_(device), context_(context) {}

// At the end of the process the driver may be gone before us: it has released
// everything then, and says so.
CudaContext::~CudaContext() { driver_->calls().cuDevicePrimaryCtxRelease_v2(device_); }

CudaPointer CudaContext::allocate(size_t num_bytes) const {
  const Current current(*driver_, context_);
  CudaPointer pointer = 0;
  driver_->check(driver_->calls().cuMemAlloc_v2(&pointer, num_bytes), "cuMemAlloc");
  return pointer;
}

void CudaContext::free(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuMemFree_v2(pointer), "cuMemFree");
}

CudaRange CudaContext::address_range(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  CudaRange range{};
  driver_->check(driver_->calls().cuMemGetAddressRange_v2(&range.base, &range.num_bytes, pointer),
                 "cuMemGetAddressRange");
  return range;
}

uint64_t CudaContext::buffer_id(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  unsigned long long id = 0;
  driver_->check(driver_->calls().cuPointerGetAttribute(&id, kBufferId, pointer), "cuPointerGetAttribute");
  return id;
}

int CudaContext::ordinal_of(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  int ordinal = 0;
  driver_->check(driver_->calls().cuPointerGetAttribute(&ordinal, kDeviceOrdinal, pointer), "cuPointerGetAttribute");
  return ordinal;
}

bool CudaContext::is_exportable(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  int is_capable = 0;  // Wider than the bool that is written, so that a driver which writes an int fits too.
  driver_->check(driver_->calls().cuPointerGetAttribute(&is_capable, kIsIpcCapable, pointer), "cuPointerGetAttribute");
  return is_capable != 0;
}

CudaIpcHandle CudaContext::export_handle(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  CudaIpcHandle handle{};
  driver_->check(driver_->calls().cuIpcGetMemHandle(&handle, pointer), "cuIpcGetMemHandle");
  return handle;
}

CudaPointer CudaContext::open_handle(const CudaIpcHandle& handle) const {
  const Current current(*driver_, context_);
  CudaPointer pointer = 0;
  driver_->check(driver_->calls().cuIpcOpenMemHandle_v2(&pointer, handle, kLazyEnablePeerAccess), "cuIpcOpenMemHandle");
  return pointer;
}

void CudaContext::close_handle(CudaPointer pointer) const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuIpcCloseMemHandle(pointer), "cuIpcCloseMemHandle");
}

void CudaContext::copy_in(CudaPointer target, const void* source, size_t num_bytes) const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuMemcpyHtoD_v2(target, source, num_bytes), "cuMemcpyHtoD");
}

void CudaContext::copy_out(void* target, CudaPointer source, size_t num_bytes) const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuMemcpyDtoH_v2(target, source, num_bytes), "cuMemcpyDtoH");
}

void CudaContext::copy_across(CudaPointer target, CudaPointer source, size_t num_bytes) const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuMemcpyDtoD_v2(target, source, num_bytes), "cuMemcpyDtoD");
}

void CudaContext::synchronize() const {
  const Current current(*driver_, context_);
  driver_->check(driver_->calls().cuCtxSynchronize(), "cuCtxSynchronize");
}

}  // namespace fastdeploy_rl
