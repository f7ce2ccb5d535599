// Tasks on torch's threads. Results never depend on which thread takes a task, or on the number of threads.
#pragma once

#include <atomic>
#include <cstdint>

#include <torch/csrc/stable/ops.h>

namespace comera {

// Threads that took a task of the last `run_tasks`.
inline std::atomic<int> threads_used{0};

// Call run(task, thread) for every task. A thread that finishes one takes the next, so a slow task delays no other. Without
// `parallel`, the calling thread takes all.
template <class Run>
void run_tasks(int64_t tasks, const Run& run, bool parallel = true) {
  const int64_t available = parallel ? torch::stable::get_num_threads() : 1, threads = available < tasks ? available : tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int> used{0};
  const auto work = [&](int64_t first, int64_t beyond) {
    for (int64_t thread = first; thread < beyond; ++thread) {
      int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task < tasks) used.fetch_add(1, std::memory_order_relaxed);
      for (; task < tasks; task = next.fetch_add(1, std::memory_order_relaxed)) run(task, thread);
    }
  };
  if (threads <= 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, threads, 1, work);
  }
  threads_used.store(used.load(), std::memory_order_relaxed);
}

}  // namespace comera
