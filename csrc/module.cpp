// Bindings of fastdeploy_rl._native; fastdeploy_rl/_native.pyi is their contract.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <system_error>

#include "buffers.h"
#include "capsule.h"
#include "collectives.h"
#include "cuda_bindings.h"
#include "dlpack.h"
#include "kernels.h"
#include "mapping.h"
#include "transfer.h"
#include "watcher.h"
#include "words.h"

namespace py = pybind11;
using namespace fastdeploy_rl;
using namespace pybind11::literals;

namespace {

using MappingPtr = std::shared_ptr<Mapping>;
using WithoutGil = py::call_guard<py::gil_scoped_release>;
// pybind11 takes None for an empty shared_ptr: arguments that are held say `none(false)`.

void serve_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// --- words ---

template <typename Word>
Word* word_at(const Mapping& mapping, int64_t offset, Access access) {
  return reinterpret_cast<Word*>(mapping.at(offset, sizeof(Word), sizeof(Word), access));
}

template <typename Word>
Word load_word(const Mapping& mapping, int64_t offset) {
  // Python code reads and writes plain bytes between two words (a sequence lock): those must stay between them.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return __atomic_load_n(word_at<Word>(mapping, offset, Access::read), __ATOMIC_SEQ_CST);
}

template <typename Word>
void store_word(const Mapping& mapping, int64_t offset, Word value) {
  __atomic_store_n(word_at<Word>(mapping, offset, Access::write), value, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <typename Word>
Word compare_exchange(const Mapping& mapping, int64_t offset, Word expected, Word desired) {
  Word* word = word_at<Word>(mapping, offset, Access::write);
  __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

uint64_t add_u64(const Mapping& mapping, int64_t offset, const py::int_& delta) {
  const uint64_t addend = PyLong_AsUnsignedLongLongMask(delta.ptr());
  return __atomic_add_fetch(word_at<uint64_t>(mapping, offset, Access::write), addend, __ATOMIC_SEQ_CST);
}

bool futex_wait_i32(const MappingPtr& mapping, int64_t offset, int32_t expected, int64_t deadline_ns) {
  const Pin pin(mapping);
  const int32_t* word = word_at<int32_t>(*mapping, offset, Access::read);
  for (;;) {
    Wake wake;
    {
      const py::gil_scoped_release release;
      wake = futex_wait(word, expected, deadline_ns);
    }
    if (wake != Wake::interrupted) return wake == Wake::changed;
    serve_signals();
  }
}

void bind_words(py::module_& m) {
  m.def("load_u64", load_word<uint64_t>, "mapping"_a, "offset"_a);
  m.def("store_u64", store_word<uint64_t>, "mapping"_a, "offset"_a, "value"_a);
  m.def("compare_exchange_u64", compare_exchange<uint64_t>, "mapping"_a, "offset"_a, "expected"_a, "desired"_a);
  m.def("add_u64", add_u64, "mapping"_a, "offset"_a, "delta"_a);
  m.def("load_i32", load_word<int32_t>, "mapping"_a, "offset"_a);
  m.def("store_i32", store_word<int32_t>, "mapping"_a, "offset"_a, "value"_a);
  m.def("compare_exchange_i32", compare_exchange<int32_t>, "mapping"_a, "offset"_a, "expected"_a, "desired"_a);
  m.def("futex_wait_i32", futex_wait_i32, "mapping"_a.none(false), "offset"_a, "expected"_a, "deadline_ns"_a);
  m.def(
      "futex_wake_i32",
      [](const Mapping& mapping, int64_t offset) {
        return futex_wake(word_at<int32_t>(mapping, offset, Access::read));
      },
      "mapping"_a, "offset"_a);
  m.def(
      "ring_bell",
      [](const Mapping& mapping, int64_t offset) { ring_bell(word_at<int32_t>(mapping, offset, Access::write)); },
      "mapping"_a, "offset"_a);
  py::class_<WordWatcher>(m, "WordWatcher", py::is_final())
      .def(py::init<MappingPtr, int64_t, MappingPtr, int64_t, int64_t>(), "word"_a.none(false), "word_offset"_a,
           "bell"_a.none(false), "bell_offset"_a, "period_us"_a)
      .def("stop", &WordWatcher::stop, WithoutGil());
}

// --- mappings and tensors ---

py::capsule dlpack_capsule(const MappingPtr& mapping, int64_t offset, const std::vector<int64_t>& shape,
                           const std::string& dtype) {
  return give_capsule(export_tensor(mapping, offset, shape, dtype));
}

BorrowedTensor borrow_dlpack(const py::object& capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    throw std::invalid_argument("not a DLPack capsule, or one that was consumed already");
  }
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (PyCapsule_SetName(capsule.ptr(), "used_dltensor") != 0) throw py::error_already_set();
  return BorrowedTensor(managed);
}

void prefault(const MappingPtr& mapping, int num_threads) {
  const Pin pin(mapping);
  const py::gil_scoped_release release;
  mapping->prefault(num_threads);
}

void bring_in(const MappingPtr& mapping, int64_t offset, int64_t num_bytes) {
  const Pin pin(mapping);
  const py::gil_scoped_release release;
  mapping->bring_in(offset, num_bytes);
}

void bind_memory(py::module_& m) {
  py::class_<Mapping, MappingPtr>(m, "Mapping", py::is_final(), py::custom_type_setup(give_buffer<MappingExport>))
      .def_static("map_fd", &Mapping::map_fd, "fd"_a, "num_bytes"_a, "writable"_a)
      .def_static("private", &Mapping::make_private, "num_bytes"_a)
      .def_property_readonly("address", [](const Mapping& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("num_bytes", &Mapping::num_bytes)
      .def_property_readonly("is_writable", &Mapping::is_writable)
      .def_property_readonly("is_closed", &Mapping::is_closed)
      .def_property_readonly("num_exports", &Mapping::num_exports)
      .def("prefault", prefault, "num_threads"_a)
      .def("bring_in", bring_in, "offset"_a, "num_bytes"_a)
      .def("close", &Mapping::close)
      .def("dlpack", dlpack_capsule, "offset"_a, "shape"_a, "dtype"_a);
  py::class_<BorrowedTensor>(m, "BorrowedTensor", py::is_final(), py::custom_type_setup(give_buffer<BorrowedExport>))
      .def_property_readonly("address",
                             [](const BorrowedTensor& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("num_bytes", &BorrowedTensor::num_bytes)
      .def_property_readonly("dtype", &BorrowedTensor::dtype)
      .def_property_readonly("shape", [](const BorrowedTensor& self) { return py::tuple(py::cast(self.shape())); })
      .def_property_readonly("is_contiguous", &BorrowedTensor::is_contiguous)
      .def_property_readonly("is_cpu", &BorrowedTensor::is_cpu)
      .def_property_readonly("device", [](const BorrowedTensor& self) {
        return py::make_tuple(self.device().device_type, self.device().device_id);
      });
  m.def("borrow_dlpack", borrow_dlpack, "capsule"_a);
}

// --- transfer ---

// A checked job and the buffers that it points into.
struct Region {
  BufferView source;
  std::optional<BufferView> target;
  Job job;
};

std::shared_ptr<Region> make_region(const py::object& source, int64_t source_offset, int64_t source_stride,
                                    int64_t rows, int64_t row_bytes, const py::object& target, int64_t target_offset,
                                    int64_t target_stride, const std::string& cast, std::optional<Place> read_place,
                                    std::optional<Place> live_place, int64_t transpose_item) {
  BufferView from(source, Access::read);
  std::optional<BufferView> to;
  if (!target.is_none()) to.emplace(target, Access::write);
  const Job job = checked_job(from.bytes(), {source_offset, source_stride},
                              to ? std::optional<Bytes>(to->bytes()) : std::nullopt, {target_offset, target_stride},
                              {rows, row_bytes, parse_cast(cast), transpose_item}, read_place, live_place);
  return std::shared_ptr<Region>(new Region{std::move(from), std::move(to), job});
}

py::object sums_tuple(bool was_asked, const Sums& sums) {
  if (!was_asked) return py::none();
  return py::make_tuple(sums.a, sums.b, sums.c, sums.d);
}

py::list transfer(const std::vector<std::shared_ptr<Region>>& regions, int num_threads) {
  std::vector<const Job*> jobs;
  jobs.reserve(regions.size());
  for (const auto& region : regions) {
    if (region == nullptr) throw py::type_error("regions must be of type Region, got None");
    jobs.push_back(&region->job);
  }
  std::vector<JobSums> sums;
  {
    const py::gil_scoped_release release;
    sums = run_jobs(jobs, num_threads);
  }
  py::list results;
  for (size_t i = 0; i < jobs.size(); ++i) {
    results.append(py::make_tuple(sums_tuple(jobs[i]->read.has_value(), sums[i].read),
                                  sums_tuple(jobs[i]->live.has_value(), sums[i].live)));
  }
  return results;
}

void bind_transfer(py::module_& m) {
  m.attr("CPU_LEVEL") = kernels().level;
  m.def("use_kernels", use_kernels, "level"_a);
  py::class_<Place>(m, "Place", py::is_final())
      .def(py::init(&checked_place), "offset"_a, "row_stride"_a, "total_bytes"_a);
  py::class_<Region, std::shared_ptr<Region>>(m, "Region", py::is_final())
      .def(py::init(&make_region), py::kw_only(), "source"_a, "source_offset"_a, "source_stride"_a, "rows"_a,
           "row_bytes"_a, "target"_a = py::none(), "target_offset"_a = 0, "target_stride"_a = 0, "cast"_a = "none",
           "read_place"_a = py::none(), "live_place"_a = py::none(), "transpose_item"_a = 0);
  m.def("transfer", transfer, "regions"_a, "num_threads"_a);
}

// --- collectives ---

void all_reduce(CollectiveGroup& group, const py::object& values, int64_t deadline_ns) {
  const BufferView view(values, Access::write);
  const Bytes bytes = view.bytes();
  if (bytes.num_bytes % sizeof(float) != 0 || reinterpret_cast<uintptr_t>(bytes.data) % alignof(float) != 0) {
    throw std::invalid_argument("values are no aligned float32 values");
  }
  const py::gil_scoped_release release;
  group.all_reduce(reinterpret_cast<float*>(bytes.data), bytes.num_bytes / sizeof(float), deadline_ns);
}

void all_gather(CollectiveGroup& group, const py::object& own, const py::object& gathered, int64_t deadline_ns) {
  const BufferView from(own, Access::read), to(gathered, Access::write);
  const Bytes source = from.bytes(), target = to.bytes();
  if (target.num_bytes != source.num_bytes * static_cast<size_t>(group.num_ranks())) {
    throw std::invalid_argument("gathered has " + std::to_string(target.num_bytes) + " bytes, expected " +
                                std::to_string(group.num_ranks()) + " x " + std::to_string(source.num_bytes));
  }
  const py::gil_scoped_release release;
  group.all_gather(source.data, source.num_bytes, target.data, deadline_ns);
}

void broadcast(CollectiveGroup& group, const py::object& values, int64_t root, int64_t deadline_ns) {
  const BufferView view(values, Access::write);
  const Bytes bytes = view.bytes();
  const py::gil_scoped_release release;
  group.broadcast(bytes.data, bytes.num_bytes, root, deadline_ns);
}

void bind_collectives(py::module_& m) {
  py::class_<CollectiveGroup>(m, "CollectiveGroup", py::is_final())
      .def(py::init([](MappingPtr mapping, int64_t rank, int64_t num_ranks, int64_t slot_bytes, int64_t generation) {
             return std::make_unique<CollectiveGroup>(std::move(mapping), rank, num_ranks, slot_bytes, generation,
                                                      serve_signals);
           }),
           "mapping"_a.none(false), "rank"_a, "num_ranks"_a, "slot_bytes"_a, "generation"_a)
      .def_static("required_bytes", &CollectiveGroup::required_bytes, "num_ranks"_a, "slot_bytes"_a)
      .def_static(
          "advance",
          [](const MappingPtr& mapping, int64_t num_ranks, int64_t slot_bytes, int64_t generation) {
            CollectiveGroup::advance(*mapping, num_ranks, slot_bytes, generation);
          },
          "mapping"_a.none(false), "num_ranks"_a, "slot_bytes"_a, "generation"_a)
      .def("all_reduce_f32", all_reduce, "values"_a, "deadline_ns"_a)
      .def("all_gather", all_gather, "own"_a, "gathered"_a, "deadline_ns"_a)
      .def("broadcast", broadcast, "values"_a, "root"_a, "deadline_ns"_a)
      .def("barrier", &CollectiveGroup::barrier, "deadline_ns"_a, WithoutGil());
}

// --- errors ---

void set_missing_ranks(const py::object& type, const MissingRanks& missing) {
  const py::tuple ranks(py::cast(missing.ranks));
  PyErr_SetObject(type.ptr(), py::make_tuple(missing.what, ranks, missing.generation).ptr());
}

void bind_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> missing_ranks_error;
  missing_ranks_error.call_once_and_store_result([&]() -> py::object {
    return py::reinterpret_steal<py::object>(
        PyErr_NewException("fastdeploy_rl._native.MissingRanksError", PyExc_Exception, nullptr));
  });
  m.attr("MissingRanksError") = missing_ranks_error.get_stored();
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const MissingRanks& missing) {
      set_missing_ranks(missing_ranks_error.get_stored(), missing);
    } catch (const StillExported& exported) {
      PyErr_SetString(PyExc_BufferError, exported.what());
    } catch (const std::system_error& failure) {
      errno = failure.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native core: shared words, mappings, copy / cast / checksum, shared-memory collectives, CUDA.";
  bind_errors(m);
  bind_memory(m);
  bind_words(m);
  bind_transfer(m);
  bind_collectives(m);
  bind_cuda(m);
}
