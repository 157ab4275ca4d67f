// One block of device memory and the count of those who look at it: allocated
// by us, opened from another process, or somebody else's in this process.
// Invariant: what is to be freed or closed is, once; `close` refuses while an
// export lives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "dlpack.h"

namespace fastdeploy_rl {

class CudaMemory {
 public:
  static std::shared_ptr<CudaMemory> allocate(std::shared_ptr<CudaContext> context, int64_t num_bytes);
  // `num_bytes`: what the exporter says the allocation has.
  static std::shared_ptr<CudaMemory> open(std::shared_ptr<CudaContext> context, const CudaIpcHandle& handle,
                                          int64_t num_bytes);
  static std::shared_ptr<CudaMemory> borrow(std::shared_ptr<CudaContext> context, CudaPointer address,
                                            int64_t num_bytes);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  CudaPointer address() const { return address_; }
  size_t num_bytes() const { return num_bytes_; }
  const CudaContext& context() const { return *context_; }
  bool is_closed() const { return address_ == 0; }
  int64_t num_exports() const { return num_exports_.load(); }

  // Frees or closes now; StillExported while tensors lie in it. A second close
  // does nothing.
  void close();

  // Address of `num_bytes` bytes at `offset`; std::invalid_argument when
  // closed, out of bounds or misaligned.
  CudaPointer at(int64_t offset, size_t num_bytes, size_t alignment) const;

  void write(int64_t offset, const void* source, size_t num_bytes) const;
  void read(int64_t offset, void* target, size_t num_bytes) const;
  void copy_from(int64_t offset, const CudaMemory& source, int64_t source_offset, size_t num_bytes) const;

  // Counted from any thread: a DLPack tensor may die without the interpreter
  // lock.
  void add_export() { ++num_exports_; }
  void remove_export() { --num_exports_; }

 private:
  enum class Origin { allocated, opened, borrowed };

  CudaMemory(std::shared_ptr<CudaContext> context, CudaPointer address, size_t num_bytes, Origin origin);
  void give_back(CudaPointer address) const;

  std::shared_ptr<CudaContext> context_;
  CudaPointer address_;
  size_t num_bytes_;
  Origin origin_;
  std::atomic<int64_t> num_exports_{0};
};

// A kDLCUDA tensor over bytes of the block, which it keeps. The caller (or its
// consumer) calls `deleter`, on any thread.
DLManagedTensor* export_tensor(std::shared_ptr<CudaMemory> memory, int64_t offset, const std::vector<int64_t>& shape,
                               const std::string& dtype);

}  // namespace fastdeploy_rl
