// Threads that work on one thing together, phase after phase, without returning to whoever started them.
#pragma once

#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "in_threads.hpp"

namespace pipeedge::parallel {

/// Threads that divide the items of each phase among themselves. No thread begins a phase before all have ended the one
/// before it.
class Team {
 public:
  /// Calls `work(thread)` in each of up to `threads` threads, as far as so many multiplications make them worth the
  /// time, and returns when all have ended. Every thread must reach the same phases in the same order. There are fewer
  /// threads if the system has no more to give.
  template <typename Work>
  void run(std::size_t threads, std::size_t multiplications, const Work& work) {
    threads = worthwhile_threads(multiplications, threads);
    std::atomic<bool> ready{false};
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
      for (std::size_t i = 1; i < threads; ++i) {
        others.emplace_back([&, i] {
          while (!ready.load(std::memory_order_acquire)) pause();
          work(i);
        });
      }
    } catch (const std::system_error&) {  // those that have started do the work
    }
    size_ = others.size() + 1;
    ready.store(true, std::memory_order_release);
    work(std::size_t{0});
    for (std::thread& other : others) other.join();
  }

  /// Calls `work(item)` once for each item below `count`, in any thread and any order, and waits for all.
  template <typename Work>
  void share(std::size_t count, const Work& work) {
    for (std::size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      work(i);
    }
    wait();
  }

  std::size_t size() const { return size_; }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  /// Waits until all threads are here.
  void wait() {
    constexpr int kPatience = 2000;  // a processor that others use as well is given up now and then
    const std::size_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turns = 0; round_.load(std::memory_order_acquire) == round; ++turns) {
      if (turns < kPatience) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::size_t size_ = 1;
  std::atomic<std::size_t> next_{0}, arrived_{0}, round_{0};
};

}  // namespace pipeedge::parallel
