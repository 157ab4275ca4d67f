#include "cuda_memory.h"

#include <utility>

#include "mapping.h"

namespace fastdeploy_rl {

namespace {

size_t checked_size(int64_t num_bytes) {
  if (num_bytes <= 0) throw std::invalid_argument("num_bytes must be positive, got " + std::to_string(num_bytes));
  return static_cast<size_t>(num_bytes);
}

// Counts one export for as long as it lives.
class CudaPin {
 public:
  explicit CudaPin(std::shared_ptr<CudaMemory> memory) : memory_(std::move(memory)) { memory_->add_export(); }
  ~CudaPin() { memory_->remove_export(); }
  CudaPin(const CudaPin&) = delete;
  CudaPin& operator=(const CudaPin&) = delete;

 private:
  std::shared_ptr<CudaMemory> memory_;
};

}  // namespace

std::shared_ptr<CudaMemory> CudaMemory::allocate(std::shared_ptr<CudaContext> context, int64_t num_bytes) {
  const size_t size = checked_size(num_bytes);
  const CudaPointer address = context->allocate(size);
  return std::shared_ptr<CudaMemory>(new CudaMemory(std::move(context), address, size, Origin::allocated));
}

std::shared_ptr<CudaMemory> CudaMemory::open(std::shared_ptr<CudaContext> context, const CudaIpcHandle& handle,
                                             int64_t num_bytes) {
  const size_t size = checked_size(num_bytes);
  const CudaPointer address = context->open_handle(handle);
  return std::shared_ptr<CudaMemory>(new CudaMemory(std::move(context), address, size, Origin::opened));
}

std::shared_ptr<CudaMemory> CudaMemory::borrow(std::shared_ptr<CudaContext> context, CudaPointer address,
                                               int64_t num_bytes) {
  const size_t size = checked_size(num_bytes);
  if (address == 0) throw std::invalid_argument("no memory lies at address 0");
  return std::shared_ptr<CudaMemory>(new CudaMemory(std::move(context), address, size, Origin::borrowed));
}

CudaMemory::CudaMemory(std::shared_ptr<CudaContext> context, CudaPointer address, size_t num_bytes, Origin origin)
    : context_(std::move(context)), address_(address), num_bytes_(num_bytes), origin_(origin) {}

CudaMemory::~CudaMemory() {
  if (is_closed() || origin_ == Origin::borrowed) return;
  if (origin_ == Origin::allocated) {
    // Another process may have it open, and freeing it then is undefined: so it stays until this process ends, and the
    // context with it, whose last release would free it.
    new std::shared_ptr<CudaContext>(context_);
    return;
  }
  try {
    give_back(address_);
  } catch (const CudaFailure&) {
    // Nobody is left to hear of it; at the end of the process the driver may be gone before us.
  }
}

void CudaMemory::give_back(CudaPointer address) const {
  if (origin_ == Origin::allocated) context_->free(address);
  if (origin_ == Origin::opened) context_->close_handle(address);
}

void CudaMemory::close() {
  if (is_closed()) return;
  if (num_exports() != 0) {
    throw StillExported("cannot give device memory back: " + std::to_string(num_exports()) + " tensors lie in it");
  }
  give_back(address_);
  address_ = 0;
}

CudaPointer CudaMemory::at(int64_t offset, size_t num_bytes, size_t alignment) const {
  if (is_closed()) throw std::invalid_argument("the device memory is closed");
  if (offset < 0 || static_cast<size_t>(offset) > num_bytes_ || num_bytes > num_bytes_ - static_cast<size_t>(offset)) {
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes at offset " + std::to_string(offset) +
                                " are not inside device memory of " + std::to_string(num_bytes_));
  }
  const CudaPointer address = address_ + static_cast<CudaPointer>(offset);
  if (address % alignment != 0) {
    throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of " +
                                std::to_string(alignment));
  }
  return address;
}

void CudaMemory::write(int64_t offset, const void* source, size_t num_bytes) const {
  const CudaPointer target = at(offset, num_bytes, 1);
  if (num_bytes != 0) context_->copy_in(target, source, num_bytes);
}

void CudaMemory::read(int64_t offset, void* target, size_t num_bytes) const {
  const CudaPointer source = at(offset, num_bytes, 1);
  if (num_bytes != 0) context_->copy_out(target, source, num_bytes);
}

void CudaMemory::copy_from(int64_t offset, const CudaMemory& source, int64_t source_offset, size_t num_bytes) const {
  const CudaPointer to = at(offset, num_bytes, 1), from = source.at(source_offset, num_bytes, 1);
  if (num_bytes != 0) context_->copy_across(to, from, num_bytes);
}

DLManagedTensor* export_tensor(std::shared_ptr<CudaMemory> memory, int64_t offset, const std::vector<int64_t>& shape,
                               const std::string& dtype) {
  const CudaPointer address = memory->at(offset, tensor_bytes(shape, dtype), item_bytes(dtype));
  const DLDevice device{kDLCUDA, memory->context().ordinal()};
  auto* data = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
  return make_tensor(data, device, std::make_shared<CudaPin>(std::move(memory)), shape, dtype);
}

}  // namespace fastdeploy_rl
