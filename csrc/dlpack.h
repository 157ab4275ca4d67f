// DLPack (unversioned ABI, v0.8): the structs, a mapping's bytes as a tensor,
// and somebody else's tensor as bytes. The structs are those of
// https://github.com/dmlc/dlpack; only what tensors in CPU and CUDA memory
// need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mapping.h"

namespace fastdeploy_rl {

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 };

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // In elements; nullptr: C-contiguous.
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "layout fixed by the DLPack ABI");

size_t item_bytes(const std::string& dtype);

// Bytes of a contiguous tensor; std::invalid_argument for a dtype or shape that
// no tensor has.
size_t tensor_bytes(const std::vector<int64_t>& shape, const std::string& dtype);

// A contiguous tensor at `data` that holds `keeper` until the caller (or its
// consumer) calls `deleter`.
DLManagedTensor* make_tensor(void* data, DLDevice device, std::shared_ptr<const void> keeper,
                             const std::vector<int64_t>& shape, const std::string& dtype);

// A tensor over bytes of the mapping, which it pins. The caller (or its
// consumer) calls `deleter`, on any thread.
DLManagedTensor* export_tensor(std::shared_ptr<Mapping> mapping, int64_t offset, const std::vector<int64_t>& shape,
                               const std::string& dtype);

// Owns a tensor taken over from a capsule; std::invalid_argument when its dtype
// has no safetensors name.
class BorrowedTensor {
 public:
  explicit BorrowedTensor(DLManagedTensor* managed);

  uint8_t* data() const;
  size_t num_bytes() const;
  const std::string& dtype() const { return dtype_; }
  std::vector<int64_t> shape() const;
  bool is_contiguous() const;
  bool is_cpu() const;
  DLDevice device() const { return managed_->dl_tensor.device; }

 private:
  struct Release {
    void operator()(DLManagedTensor* managed) const {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
  };

  std::unique_ptr<DLManagedTensor, Release> managed_;
  std::string dtype_;
  size_t item_bytes_;
};

}  // namespace fastdeploy_rl
