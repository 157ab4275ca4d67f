#include "dlpack.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fastdeploy_rl {

namespace {

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12
};

constexpr size_t kMaxDimensions = 64;

struct NamedType {
  const char* name;
  DLDataType type;
};

constexpr NamedType kTypes[] = {
    {"F64", {kFloat, 64, 1}},
    {"F32", {kFloat, 32, 1}},
    {"F16", {kFloat, 16, 1}},
    {"BF16", {kBfloat, 16, 1}},
    {"I64", {kInt, 64, 1}},
    {"I32", {kInt, 32, 1}},
    {"I16", {kInt, 16, 1}},
    {"I8", {kInt, 8, 1}},
    {"U8", {kUInt, 8, 1}},
    {"BOOL", {kBool, 8, 1}},
    {"F8_E4M3", {kFloat8E4M3FN, 8, 1}},
    {"F8_E5M2", {kFloat8E5M2, 8, 1}},
};

const NamedType& type_named(const std::string& name) {
  for (const NamedType& type : kTypes) {
    if (name == type.name) return type;
  }
  throw std::invalid_argument("unknown dtype '" + name + "'");
}

const NamedType& name_of(const DLDataType& type) {
  for (const NamedType& named : kTypes) {
    if (named.type.code == type.code && named.type.bits == type.bits && type.lanes == 1) return named;
  }
  throw std::invalid_argument("a DLPack dtype of code " + std::to_string(type.code) + " and " +
                              std::to_string(type.bits) + " bits has no safetensors name");
}

// Bytes of the tensor. Strides must fit too: those of an empty tensor are as large as if it were not.
size_t checked_bytes(const std::vector<int64_t>& shape, size_t item_bytes) {
  if (shape.size() > kMaxDimensions) throw std::invalid_argument("too many dimensions");
  int64_t reach = static_cast<int64_t>(item_bytes);
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) throw std::invalid_argument("a dimension of " + std::to_string(size));
    is_empty = is_empty || size == 0;
    if (__builtin_mul_overflow(reach, std::max<int64_t>(size, 1), &reach)) {
      throw std::invalid_argument("the shape has too many bytes");
    }
  }
  return is_empty ? 0 : static_cast<size_t>(reach);
}

// What an exported tensor needs to live, in one allocation.
struct Exported {
  DLManagedTensor managed;
  std::shared_ptr<const void> keeper;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * std::max<int64_t>(shape[axis], 1);
  return strides;
}

}  // namespace

size_t item_bytes(const std::string& dtype) { return type_named(dtype).type.bits / 8; }

size_t tensor_bytes(const std::vector<int64_t>& shape, const std::string& dtype) {
  return checked_bytes(shape, item_bytes(dtype));
}

DLManagedTensor* make_tensor(void* data, DLDevice device, std::shared_ptr<const void> keeper,
                             const std::vector<int64_t>& shape, const std::string& dtype) {
  const DLDataType type = type_named(dtype).type;
  auto* exported = new Exported{{}, std::move(keeper), shape, contiguous_strides(shape)};
  exported->managed.dl_tensor = {
      data, device, static_cast<int32_t>(shape.size()), type, exported->shape.data(), exported->strides.data(), 0};
  exported->managed.manager_ctx = exported;
  exported->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Exported*>(self->manager_ctx); };
  return &exported->managed;
}

DLManagedTensor* export_tensor(std::shared_ptr<Mapping> mapping, int64_t offset, const std::vector<int64_t>& shape,
                               const std::string& dtype) {
  uint8_t* data = mapping->at(offset, tensor_bytes(shape, dtype), item_bytes(dtype), Access::read);
  return make_tensor(data, {kDLCPU, 0}, std::make_shared<Pin>(std::move(mapping)), shape, dtype);
}

BorrowedTensor::BorrowedTensor(DLManagedTensor* managed) : managed_(managed) {
  const NamedType& named = name_of(managed->dl_tensor.dtype);
  dtype_ = named.name;
  item_bytes_ = named.type.bits / 8;
  checked_bytes(shape(), item_bytes_);
}

uint8_t* BorrowedTensor::data() const {
  return static_cast<uint8_t*>(managed_->dl_tensor.data) + managed_->dl_tensor.byte_offset;
}

size_t BorrowedTensor::num_bytes() const { return checked_bytes(shape(), item_bytes_); }

std::vector<int64_t> BorrowedTensor::shape() const {
  const DLTensor& tensor = managed_->dl_tensor;
  return {tensor.shape, tensor.shape + tensor.ndim};
}

bool BorrowedTensor::is_contiguous() const {
  const DLTensor& tensor = managed_->dl_tensor;
  if (tensor.strides == nullptr || num_bytes() == 0) return true;
  int64_t stride = 1;
  for (int axis = tensor.ndim; axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != stride) return false;
    stride *= tensor.shape[axis];
  }
  return true;
}

// Pinned host memory is as readable as any other.
bool BorrowedTensor::is_cpu() const {
  const int32_t type = managed_->dl_tensor.device.device_type;
  return type == kDLCPU || type == kDLCUDAHost;
}

}  // namespace fastdeploy_rl
