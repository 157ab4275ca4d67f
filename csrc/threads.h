// Native threads that take no signals: Python wants those on its main thread.
#pragma once

#include <functional>
#include <thread>

namespace fastdeploy_rl {

// A thread that has every signal blocked. std::system_error where the system has none to give.
std::thread start_quiet_thread(std::function<void()> body);

// Calls work(0) .. work(num_threads - 1), the first on the caller's thread, and returns when all are done. Where the
// system refuses a thread, the caller does its share too. `work` must not throw. std::invalid_argument when num_threads
// < 1.
void run_on_threads(int num_threads, const std::function<void(int)>& work);

}  // namespace fastdeploy_rl
