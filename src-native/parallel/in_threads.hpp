// Work divided among threads, and the memory of each thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace pipeedge::parallel {

/// Range number `index` of `count` ranges of nearly equal size.
struct Range {
  Range(std::size_t size, std::size_t count, std::size_t index)
      : begin(size * index / count), end(size * (index + 1) / count) {}
  std::size_t begin, end;
};

/// Multiplications for which starting a thread is worth its time.
constexpr std::size_t kThreadWork = std::size_t{1} << 24;

/// Returns how many threads, at least one and at most `threads`, so many multiplications are worth.
inline std::size_t worthwhile_threads(std::size_t multiplications, std::size_t threads) {
  return std::max<std::size_t>(1, std::min(threads, multiplications / kThreadWork));
}

/// Calls `work` with ranges of `items`, in up to `threads` threads, as far as `work_of_item` multiplications make it
/// worth the time.
template <typename Work>
void in_threads(std::size_t items, std::size_t work_of_item, std::size_t threads, const Work& work) {
  const std::size_t count = worthwhile_threads(items * work_of_item, std::min(threads, items));
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < count; ++i) others.emplace_back([&, i] { work(Range(items, count, i)); });
  work(Range(items, count, 0));
  for (std::thread& other : others) other.join();
}

/// Memory that grows, aligned for vectors. Threads keep theirs, because new memory costs time for each of its pages.
template <typename T>
class Scratch {
 public:
  /// Returns room for `size` values, which have any value.
  T* room(std::size_t size) {
    constexpr std::size_t kLine = 64;
    if (memory_.size() < size + kLine / sizeof(T)) memory_.resize(size + kLine / sizeof(T));
    const std::size_t over = reinterpret_cast<std::uintptr_t>(memory_.data()) % kLine;
    return memory_.data() + (over == 0 ? 0 : (kLine - over) / sizeof(T));
  }

 private:
  std::vector<T> memory_;
};

}  // namespace pipeedge::parallel
