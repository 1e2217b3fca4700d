// Numbers of used hosts by class, packed into words, for labels of a search.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipeedge {

// Counts of all resources in one row of words, with a spare bit above each count. All counts of a are <= those
// of b if subtracting a from b with its spare bits set clears none of these.
class Counts {
 public:
  explicit Counts(const std::vector<int>& capacities) {
    int shift = 0;
    for (const int capacity : capacities) {
      int bits = 1;
      while ((capacity >> bits) != 0) ++bits;
      if (spare_.empty() || shift + bits + 1 > 64) {
        spare_.push_back(0);
        shift = 0;
      }
      Field field;
      field.word = spare_.size() - 1;
      field.one = std::uint64_t{1} << shift;
      field.mask = ((std::uint64_t{1} << bits) - 1) << shift;
      field.full = static_cast<std::uint64_t>(capacity) << shift;
      fields_.push_back(field);
      spare_.back() |= std::uint64_t{1} << (shift + bits);
      shift += bits + 1;
    }
    if (spare_.empty()) spare_.push_back(0);
  }

  std::size_t words() const { return spare_.size(); }
  bool full(const std::uint64_t* counts, int resource) const {
    const Field& field = fields_[static_cast<std::size_t>(resource)];
    return (counts[field.word] & field.mask) == field.full;
  }
  void add(std::uint64_t* counts, int resource) const {
    const Field& field = fields_[static_cast<std::size_t>(resource)];
    counts[field.word] += field.one;
  }
  // Whether all counts are at most those of `more`; in the first word alone, which decides most often, and in the rest.
  bool covers_first(std::uint64_t less, std::uint64_t more) const { return covers_word(0, less, more); }
  bool covers_rest(const std::uint64_t* less, const std::uint64_t* more) const {
    for (std::size_t w = 1; w < spare_.size(); ++w) {
      if (!covers_word(w, less[w], more[w])) return false;
    }
    return true;
  }

 private:
  bool covers_word(std::size_t w, std::uint64_t less, std::uint64_t more) const {
    return (((more | spare_[w]) - less) & spare_[w]) == spare_[w];
  }

  struct Field {
    std::size_t word = 0;
    std::uint64_t one = 0, mask = 0, full = 0;
  };
  std::vector<Field> fields_;
  std::vector<std::uint64_t> spare_;
};

}  // namespace pipeedge
