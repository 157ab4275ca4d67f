// The CUDA driver, loaded at run time: a table of the few calls we use, and a
// device's primary context. Nothing of CUDA is needed to build or to load this;
// a driver that lacks a call is refused when it is loaded. Invariant: every
// call that needs a context runs with ours current, and leaves the caller's
// current one as it was.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace fastdeploy_rl {

// Raised where a call fails; Python sees _native.CudaDriverError. `code` is
// CUresult, or -1 where the library itself cannot be used.
struct CudaFailure : std::runtime_error {
  CudaFailure(std::string call, int code, std::string name, const std::string& text)
      : std::runtime_error(text), call(std::move(call)), code(code), name(std::move(name)) {}
  std::string call;
  int code;
  std::string name;
};

using CudaPointer = uint64_t;
using CudaUuid = std::array<uint8_t, 16>;

struct CudaIpcHandle {
  uint8_t reserved[64];
};

struct CudaRange {
  CudaPointer base;
  size_t num_bytes;
};

// The entry points, named as in cuda.h; `int` stands for CUresult and CUdevice,
// `void*` for CUcontext.
struct CudaCalls {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorName)(int error, const char** text);
  int (*cuGetErrorString)(int error, const char** text);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetName)(char* name, int length, int device);
  int (*cuDeviceGetUuid)(uint8_t* uuid, int device);
  int (*cuDeviceGetUuid_v2)(uint8_t* uuid, int device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuDevicePrimaryCtxRelease_v2)(int device);
  int (*cuCtxPushCurrent_v2)(void* context);
  int (*cuCtxPopCurrent_v2)(void** context);
  int (*cuCtxSynchronize)();
  int (*cuMemAlloc_v2)(CudaPointer* pointer, size_t num_bytes);
  int (*cuMemFree_v2)(CudaPointer pointer);
  int (*cuMemGetAddressRange_v2)(CudaPointer* base, size_t* num_bytes, CudaPointer pointer);
  int (*cuPointerGetAttribute)(void* data, int attribute, CudaPointer pointer);
  int (*cuIpcGetMemHandle)(CudaIpcHandle* handle, CudaPointer pointer);
  int (*cuIpcOpenMemHandle_v2)(CudaPointer* pointer, CudaIpcHandle handle, unsigned flags);
  int (*cuIpcCloseMemHandle)(CudaPointer pointer);
  int (*cuMemcpyHtoD_v2)(CudaPointer target, const void* source, size_t num_bytes);
  int (*cuMemcpyDtoH_v2)(void* target, CudaPointer source, size_t num_bytes);
  int (*cuMemcpyDtoD_v2)(CudaPointer target, CudaPointer source, size_t num_bytes);
};

class CudaDriver {
 public:
  // Loads and initialises; CudaFailure otherwise. The library stays loaded
  // until the process ends.
  static std::shared_ptr<CudaDriver> load(const std::string& path);

  const CudaCalls& calls() const { return calls_; }
  void check(int code, const char* call) const;

  int version() const;
  int num_devices() const;
  int device(int ordinal) const;
  std::string device_name(int ordinal) const;
  // The identifier of the MIG instance where the device is one, else of the
  // GPU.
  CudaUuid device_uuid(int ordinal) const;
  bool is_mig(int ordinal) const;

 private:
  CudaDriver() = default;

  CudaCalls calls_{};
};

// A reference to the primary context of one device: the one that Paddle and
// torch use too.
class CudaContext {
 public:
  static std::shared_ptr<CudaContext> retain(std::shared_ptr<CudaDriver> driver, int ordinal);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const { return *driver_; }
  int ordinal() const { return ordinal_; }

  CudaPointer allocate(size_t num_bytes) const;
  void free(CudaPointer pointer) const;
  CudaRange address_range(CudaPointer pointer) const;
  // Unique among all allocations of this process, also freed ones.
  uint64_t buffer_id(CudaPointer pointer) const;
  int ordinal_of(CudaPointer pointer) const;
  // False for memory of virtual-memory and stream-ordered allocators.
  bool is_exportable(CudaPointer pointer) const;
  CudaIpcHandle export_handle(CudaPointer pointer) const;
  CudaPointer open_handle(const CudaIpcHandle& handle) const;
  void close_handle(CudaPointer pointer) const;
  void copy_in(CudaPointer target, const void* source, size_t num_bytes) const;
  void copy_out(void* target, CudaPointer source, size_t num_bytes) const;
  void copy_across(CudaPointer target, CudaPointer source, size_t num_bytes) const;
  void synchronize() const;

 private:
  CudaContext(std::shared_ptr<CudaDriver> driver, int ordinal, int device, void* context);

  std::shared_ptr<CudaDriver> driver_;
  int ordinal_;
  int device_;
  void* context_;
};

}  // namespace fastdeploy_rl
