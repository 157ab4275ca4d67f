// The buffer protocol: views of other people's buffers, and our own types as buffers.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "dlpack.h"
#include "job.h"
#include "mapping.h"

namespace fastdeploy_rl {

// Holds a C-contiguous view of a Python buffer. Made and dropped with the interpreter lock held.
class BufferView {
 public:
  BufferView(const pybind11::object& object, Access access) {
    const int flags = access == Access::write ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(BufferView&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  BufferView& operator=(BufferView&&) = delete;

  Bytes bytes() const { return {static_cast<uint8_t*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_{};
};

// How an object of ours shows its bytes: `check` throws where it cannot, `acquired` / `released` count.
struct MappingExport {
  using Type = Mapping;
  static void check(const Mapping& mapping) {
    if (mapping.is_closed()) throw std::runtime_error("the mapping is closed");
  }
  static bool is_writable(const Mapping& mapping) { return mapping.is_writable(); }
  static void acquired(Mapping& mapping) { mapping.add_export(); }
  static void released(Mapping& mapping) { mapping.remove_export(); }
};

struct BorrowedExport {
  using Type = BorrowedTensor;
  static void check(const BorrowedTensor& tensor) {
    if (!tensor.is_cpu()) throw std::runtime_error("the tensor is not in CPU memory");
    if (!tensor.is_contiguous()) throw std::runtime_error("the tensor is not contiguous");
  }
  static bool is_writable(const BorrowedTensor&) { return true; }
  static void acquired(BorrowedTensor&) {}
  static void released(BorrowedTensor&) {}
};

template <typename Export>
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  view->obj = nullptr;
  try {
    auto& object = pybind11::cast<typename Export::Type&>(pybind11::handle(self));
    Export::check(object);
    const int is_readonly = Export::is_writable(object) ? 0 : 1;
    const auto num_bytes = static_cast<Py_ssize_t>(object.num_bytes());
    if (PyBuffer_FillInfo(view, self, object.data(), num_bytes, is_readonly, flags) != 0) return -1;
    Export::acquired(object);
    return 0;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
    return -1;
  }
}

template <typename Export>
void release_buffer(PyObject* self, Py_buffer*) {
  Export::released(pybind11::cast<typename Export::Type&>(pybind11::handle(self)));
}

// For pybind11::custom_type_setup. pybind11's own buffer support has no hook for the release, and we must count.
template <typename Export>
void give_buffer(PyHeapTypeObject* type) {
  type->as_buffer.bf_getbuffer = get_buffer<Export>;
  type->as_buffer.bf_releasebuffer = release_buffer<Export>;
  type->ht_type.tp_as_buffer = &type->as_buffer;
}

}  // namespace fastdeploy_rl
