// One mmap'ed run of bytes and the count of those who look at it.
// Invariant: the memory stays mapped while a Pin or an export lives; `close` refuses until then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace fastdeploy_rl {

// Raised by close() while exports live; Python sees BufferError.
struct StillExported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Access { read, write };

class Mapping {
 public:
  static std::shared_ptr<Mapping> map_fd(int fd, int64_t num_bytes, bool writable);
  static std::shared_ptr<Mapping> make_private(int64_t num_bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  bool is_writable() const { return is_writable_; }
  bool is_closed() const { return data_ == nullptr; }
  int64_t num_exports() const { return num_exports_.load(); }

  void prefault(int num_threads) const;
  // The pages of these bytes, for reading; std::system_error where the file cannot give them.
  void bring_in(int64_t offset, int64_t num_bytes) const;
  void close();

  // Address of `num_bytes` bytes at `offset`; std::invalid_argument when closed, out of bounds, misaligned or not
  // writable.
  uint8_t* at(int64_t offset, size_t num_bytes, size_t alignment, Access access) const;

  // Counted from any thread: a DLPack tensor may die without the interpreter lock.
  void add_export() { ++num_exports_; }
  void remove_export() { --num_exports_; }

 private:
  Mapping(uint8_t* data, size_t num_bytes, bool is_writable);

  uint8_t* data_;
  size_t num_bytes_;
  bool is_writable_;
  std::atomic<int64_t> num_exports_{0};
};

// Keeps a mapping alive and mapped.
class Pin {
 public:
  explicit Pin(std::shared_ptr<Mapping> mapping);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  const Mapping& operator*() const { return *mapping_; }

 private:
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace fastdeploy_rl
