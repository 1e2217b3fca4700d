// A problem prepared for search: hosts that cannot be told apart are one class with a count.
//
// Two hosts are alike when they have the same device type, neither is the data host, and swapping
// them changes no link. Without a links table bytes / min(bw_u, bw_v) = max(bytes / bw_u, bytes / bw_v),
// so the cost of a link splits into one term for each end and a stage depends on its own host alone
// ("separable"); with one that says otherwise the host of the stage before matters ("pairwise").
#pragma once

#include <vector>

#include "links.hpp"
#include "problem.hpp"

namespace pipeedge {

// Two values closer than this, relatively, are equal: sums of the same times in another order are.
constexpr double kRelativeTolerance = 1e-9;

inline double loosened(double value) { return value + value * kRelativeTolerance; }

class Instance {
 public:
  explicit Instance(const Problem& problem);

  const Problem& problem() const { return problem_; }
  int layers() const { return layers_; }
  int classes() const { return static_cast<int>(hosts_.size()); }
  bool pairwise() const { return pairwise_; }

  // Hosts of a class, in the order of the devices file.
  const std::vector<int>& hosts(int cls) const { return hosts_[index(cls)]; }
  int count(int cls) const { return static_cast<int>(hosts_[index(cls)].size()); }
  const DeviceType& type(int cls) const { return *types_[index(cls)]; }
  double bytes(int cut) const { return bytes_[index(cut)]; }

  bool fits(int cls, double layers_mem_bytes, int first, int last) const {
    return layers_mem_bytes + (buffer_in_[index(first)] + buffer_out_[index(last)]) <= memory_[index(cls)];
  }
  // Time that layers [first, last) take at least, each on its fastest host.
  double fastest(int first, int last) const { return fastest_[index(last)] - fastest_[index(first)]; }
  double link(int from_cls, int to_cls, int cut) const;
  LinkSpeed speed(int from_cls, int to_cls) const;
  // Time from the data host to the first stage and from the last stage back; 0 without a data host.
  double link_from_data(int cls) const { return from_data_[index(cls)]; }
  double link_to_data(int cls) const { return to_data_[index(cls)]; }
  // The link of a stage at a cut as far as its own end decides it: exact when separable, else a bound.
  double link_in(int cls, int cut) const;
  double link_out(int cls, int cut) const;

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  void classify(const LinkTable& links);
  void measure_links(const LinkTable& links);

  const Problem& problem_;
  int layers_;
  bool pairwise_ = false;
  std::vector<std::vector<int>> hosts_;
  std::vector<const DeviceType*> types_;
  std::vector<double> memory_;
  std::vector<double> bytes_, buffer_in_, buffer_out_;
  std::vector<double> fastest_;                 // of the layers before each cut
  std::vector<double> from_data_, to_data_;
  std::vector<LinkSpeed> speeds_;               // pairwise only: [from * classes + to]
  std::vector<LinkSpeed> best_in_, best_out_;   // pairwise only: the best of each over all partners
};

}  // namespace pipeedge
