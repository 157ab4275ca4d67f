#include "cuda_bindings.h"

#include <pybind11/stl.h>

#include <cstring>

#include "buffers.h"
#include "capsule.h"
#include "cuda_driver.h"
#include "cuda_memory.h"

namespace py = pybind11;

namespace fastdeploy_rl {

namespace {

using namespace pybind11::literals;

using ContextPtr = std::shared_ptr<CudaContext>;
using MemoryPtr = std::shared_ptr<CudaMemory>;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void bind_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> driver_error;
  driver_error.call_once_and_store_result([&]() -> py::object {
    return py::reinterpret_steal<py::object>(
        PyErr_NewException("fastdeploy_rl._native.CudaDriverError", PyExc_Exception, nullptr));
  });
  m.attr("CudaDriverError") = driver_error.get_stored();
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const CudaFailure& failure) {
      const py::tuple args = py::make_tuple(failure.call, failure.code, failure.name, failure.what());
      PyErr_SetObject(driver_error.get_stored().ptr(), args.ptr());
    }
  });
}

py::bytes as_bytes(const void* data, size_t num_bytes) { return py::bytes(static_cast<const char*>(data), num_bytes); }

CudaIpcHandle as_handle(const std::string& bytes) {
  CudaIpcHandle handle{};
  if (bytes.size() != sizeof(handle)) {
    throw std::invalid_argument("an IPC handle has " + std::to_string(sizeof(handle)) + " bytes, got " +
                                std::to_string(bytes.size()));
  }
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

MemoryPtr open_memory(const ContextPtr& context, const py::bytes& bytes, int64_t num_bytes) {
  const CudaIpcHandle handle = as_handle(bytes);
  const py::gil_scoped_release release;
  return CudaMemory::open(context, handle, num_bytes);
}

void write_memory(const MemoryPtr& memory, int64_t offset, const py::object& source) {
  const BufferView view(source, Access::read);
  const py::gil_scoped_release release;
  memory->write(offset, view.bytes().data, view.bytes().num_bytes);
}

void read_memory(const MemoryPtr& memory, int64_t offset, const py::object& target) {
  const BufferView view(target, Access::write);
  const py::gil_scoped_release release;
  memory->read(offset, view.bytes().data, view.bytes().num_bytes);
}

void copy_memory(const MemoryPtr& memory, int64_t offset, const MemoryPtr& source, int64_t source_offset,
                 int64_t num_bytes) {
  if (num_bytes < 0) throw std::invalid_argument("num_bytes must not be negative");
  const py::gil_scoped_release release;
  memory->copy_from(offset, *source, source_offset, static_cast<size_t>(num_bytes));
}

void bind_driver(py::module_& m) {
  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(m, "CudaDriver", py::is_final())
      .def(py::init(&CudaDriver::load), "path"_a, WithoutGil())
      .def_property_readonly("version", &CudaDriver::version)
      .def_property_readonly("num_devices", &CudaDriver::num_devices)
      .def("device_name", &CudaDriver::device_name, "ordinal"_a)
      .def(
          "device_uuid",
          [](const CudaDriver& self, int ordinal) {
            const CudaUuid uuid = self.device_uuid(ordinal);
            return as_bytes(uuid.data(), uuid.size());
          },
          "ordinal"_a)
      .def("is_mig", &CudaDriver::is_mig, "ordinal"_a);
}

void bind_context(py::module_& m) {
  py::class_<CudaContext, ContextPtr>(m, "CudaContext", py::is_final())
      .def(py::init(&CudaContext::retain), "driver"_a.none(false), "ordinal"_a, WithoutGil())
      .def_property_readonly("ordinal", &CudaContext::ordinal)
      .def("allocate", &CudaMemory::allocate, "num_bytes"_a, WithoutGil())
      .def("open", open_memory, "handle"_a, "num_bytes"_a)
      .def("borrow", &CudaMemory::borrow, "address"_a, "num_bytes"_a)
      .def(
          "address_range",
          [](const CudaContext& self, CudaPointer address) {
            const CudaRange range = self.address_range(address);
            return py::make_tuple(range.base, range.num_bytes);
          },
          "address"_a)
      .def("buffer_id", &CudaContext::buffer_id, "address"_a)
      .def("ordinal_of", &CudaContext::ordinal_of, "address"_a)
      .def("is_exportable", &CudaContext::is_exportable, "address"_a)
      .def(
          "export_handle",
          [](const CudaContext& self, CudaPointer address) {
            const CudaIpcHandle handle = self.export_handle(address);
            return as_bytes(&handle, sizeof(handle));
          },
          "address"_a)
      .def("synchronize", &CudaContext::synchronize, WithoutGil());
}

void bind_memory(py::module_& m) {
  py::class_<CudaMemory, MemoryPtr>(m, "CudaMemory", py::is_final())
      .def_property_readonly("address", &CudaMemory::address)
      .def_property_readonly("num_bytes", &CudaMemory::num_bytes)
      .def_property_readonly("is_closed", &CudaMemory::is_closed)
      .def_property_readonly("num_exports", &CudaMemory::num_exports)
      .def("close", &CudaMemory::close, WithoutGil())
      .def("write", write_memory, "offset"_a, "source"_a)
      .def("read", read_memory, "offset"_a, "target"_a)
      .def("copy_from", copy_memory, "offset"_a, "source"_a.none(false), "source_offset"_a, "num_bytes"_a)
      .def(
          "dlpack",
          [](const MemoryPtr& self, int64_t offset, const std::vector<int64_t>& shape, const std::string& dtype) {
            return give_capsule(export_tensor(self, offset, shape, dtype));
          },
          "offset"_a, "shape"_a, "dtype"_a);
}

}  // namespace

void bind_cuda(py::module_& m) {
  bind_errors(m);
  bind_driver(m);
  bind_context(m);
  bind_memory(m);
}

}  // namespace fastdeploy_rl
