#include "mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "threads.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace fastdeploy_rl {

namespace {

size_t checked_size(int64_t num_bytes) {
  if (num_bytes <= 0) throw std::invalid_argument("num_bytes must be positive, got " + std::to_string(num_bytes));
  return static_cast<size_t>(num_bytes);
}

// Kernels before 5.14 cannot populate on request: touch each page, leaving what it holds.
void touch_pages(uint8_t* begin, uint8_t* end, size_t page, bool is_writable) {
  for (uint8_t* byte = begin; byte < end; byte += page) {
    if (is_writable) {
      __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
    } else {
      __atomic_load_n(byte, __ATOMIC_RELAXED);
    }
  }
}

void populate(uint8_t* begin, uint8_t* end, size_t page, bool is_writable) {
  if (begin >= end) return;
  const int advice = is_writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  if (madvise(begin, static_cast<size_t>(end - begin), advice) != 0) touch_pages(begin, end, page, is_writable);
}

}  // namespace

std::shared_ptr<Mapping> Mapping::map_fd(int fd, int64_t num_bytes, bool writable) {
  const size_t size = checked_size(num_bytes);
  struct stat status{};
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::system_category(), "fstat");
  // Beyond the end of the file lies SIGBUS, not an error.
  if (status.st_size < num_bytes) {
    throw std::invalid_argument("cannot map " + std::to_string(num_bytes) + " bytes of a file of " +
                                std::to_string(status.st_size));
  }
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw std::system_error(errno, std::system_category(), "mmap");
  return std::shared_ptr<Mapping>(new Mapping(static_cast<uint8_t*>(data), size, writable));
}

std::shared_ptr<Mapping> Mapping::make_private(int64_t num_bytes) {
  const size_t size = checked_size(num_bytes);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, size, MADV_HUGEPAGE);  // A wish only: arenas are large and walked from end to end.
  return std::shared_ptr<Mapping>(new Mapping(static_cast<uint8_t*>(data), size, true));
}

Mapping::Mapping(uint8_t* data, size_t num_bytes, bool is_writable)
    : data_(data), num_bytes_(num_bytes), is_writable_(is_writable) {}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
}

void Mapping::prefault(int num_threads) const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t num_pages = (num_bytes_ + page - 1) / page;
  const auto count = static_cast<size_t>(num_threads);
  run_on_threads(num_threads, [&](int thread) {
    const auto index = static_cast<size_t>(thread);
    populate(data_ + num_pages * index / count * page, data_ + num_pages * (index + 1) / count * page, page,
             is_writable_);
  });
}

void Mapping::bring_in(int64_t offset, int64_t num_bytes) const {
  if (num_bytes < 0) throw std::invalid_argument("num_bytes must not be negative, got " + std::to_string(num_bytes));
  const uint8_t* begin = at(offset, static_cast<size_t>(num_bytes), 1, Access::read);
  if (num_bytes == 0) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t skipped = reinterpret_cast<uintptr_t>(begin) % page;
  auto* first = const_cast<uint8_t*>(begin - skipped);
  if (madvise(first, static_cast<size_t>(num_bytes) + skipped, MADV_POPULATE_READ) == 0) return;
  if (errno == EINVAL) return;  // A kernel before 5.14: whoever reads brings them in, and gets a signal where it fails.
  throw std::system_error(errno, std::system_category(), "madvise");
}

void Mapping::close() {
  if (data_ == nullptr) return;
  if (num_exports() != 0) {
    throw StillExported("cannot unmap: " + std::to_string(num_exports()) + " views of the mapping are alive");
  }
  munmap(data_, num_bytes_);
  data_ = nullptr;
}

uint8_t* Mapping::at(int64_t offset, size_t num_bytes, size_t alignment, Access access) const {
  if (is_closed()) throw std::invalid_argument("the mapping is closed");
  if (offset < 0 || static_cast<size_t>(offset) > num_bytes_ || num_bytes > num_bytes_ - static_cast<size_t>(offset)) {
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes at offset " + std::to_string(offset) +
                                " are not inside a mapping of " + std::to_string(num_bytes_));
  }
  if (static_cast<size_t>(offset) % alignment != 0) {
    throw std::invalid_argument("offset " + std::to_string(offset) + " is not a multiple of " +
                                std::to_string(alignment));
  }
  if (access == Access::write && !is_writable_) throw std::invalid_argument("the mapping is read-only");
  return data_ + offset;
}

Pin::Pin(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {
  if (mapping_->is_closed()) throw std::invalid_argument("the mapping is closed");
  mapping_->add_export();
}

Pin::~Pin() { mapping_->remove_export(); }

}  // namespace fastdeploy_rl
