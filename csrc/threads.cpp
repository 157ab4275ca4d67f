#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace fastdeploy_rl {

namespace {

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_quiet_thread(std::function<void()> body) {
  const BlockedSignals blocked;  // Inherited by the new thread.
  return std::thread(std::move(body));
}

void run_on_threads(int num_threads, const std::function<void(int)>& work) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be positive, got " + std::to_string(num_threads));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_threads));
  int next = 1;
  try {
    for (; next < num_threads; ++next) threads.push_back(start_quiet_thread([&work, next] { work(next); }));
  } catch (const std::system_error&) {
    // Out of threads: slower, not wrong.
  }
  work(0);
  for (; next < num_threads; ++next) work(next);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace fastdeploy_rl
