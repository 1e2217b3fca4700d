// A problem prepared for search: hosts that are equivalent form one class with a count.
//
// Two hosts are equivalent when they have the same device type, neither is the data host, and swapping
// them changes no link. Without a links table bytes / min(bw_u, bw_v) = max(bytes / bw_u, bytes / bw_v),
// so the cost of a link splits into one term for each end, and a stage depends only on its own host
// ("separable"); with a table that overrides bandwidths, the previous host matters too ("pairwise").
#pragma once

#include <algorithm>
#include <vector>

#include "costs.hpp"
#include "links.hpp"
#include "problem.hpp"

namespace pipeedge {

// Values with a smaller relative difference are equal, such as sums of the same times in another order.
constexpr double kRelativeTolerance = 1e-9;

inline double loosened(double value) { return value + value * kRelativeTolerance; }

class Instance {
 public:
  explicit Instance(const Problem& problem);

  const Problem& problem() const { return problem_; }
  int layers() const { return layers_; }
  int classes() const { return static_cast<int>(hosts_.size()); }
  bool pairwise() const { return pairwise_; }
  // No schedule has more stages.
  int max_stages() const { return std::min(layers_, static_cast<int>(problem_.hosts.size())); }

  // Hosts of a class, in the order of the devices file.
  const std::vector<int>& hosts(int cls) const { return hosts_[index(cls)]; }
  int count(int cls) const { return static_cast<int>(hosts_[index(cls)].size()); }
  const DeviceType& type(int cls) const { return *types_[index(cls)]; }
  double bytes(int cut) const { return bytes_[index(cut)]; }   // size on a link

  // Whether a stage that is grown on a class fits into its memory, buffers included.
  bool fits(int cls, const GrowingStage& stage) const {
    const double buffers = buffer_in_[index(stage.first())] + buffer_out_[index(stage.last())];
    return type(cls).bids() || stage.held_bytes() + buffers <= memory_[index(cls)];
  }
  // Whether weights and activations alone exceed the memory, so that no longer stage fits either.
  bool overfull(int cls, const GrowingStage& stage) const { return stage.held_bytes() > memory_[index(cls)]; }
  // A stage of a class that begins at a layer; to be grown.
  GrowingStage stage_from(int cls, int first) const { return {problem_, type(cls), first}; }
  // Seconds of a stage that is grown on a class, without and with the data rank's own work.
  double stage_seconds(int cls, const GrowingStage& stage) const {
    return stage.seconds(receive(cls, stage.first()), send(cls, stage.last()));
  }
  double busy_seconds(int cls, const GrowingStage& stage) const {
    return stage_seconds(cls, stage) + data_seconds(cls, stage.first(), stage.last());
  }
  // Time of the data rank's own work beside a stage if the class is its host, else 0. A longer stage with the same
  // first layer does not have more of it.
  double data_seconds(int cls, int first, int last) const {
    return cls == data_class_ ? data_.total_s(first > 0, last < layers_) : 0;
  }
  // A lower bound on the cost of every schedule: the data rank's work, wherever the stages run.
  double data_floor() const { return data_.floor_s(); }
  // The class that consists of the data host; -1 without one.
  int data_class() const { return data_class_; }
  // Time besides the layers: taking a microbatch from the link at a cut, and passing it to the link there.
  double receive(int cls, int cut) const { return receive_[row(cls) + index(cut)]; }
  double send(int cls, int cut) const { return send_[row(cls) + index(cut)]; }
  // Whether continuing a schedule from `later` could be worse than from `cut`, with the layers between
  // them in the previous stage: because more bytes are sent or buffered at `later`, or because some host
  // needs more time to receive them than those layers would have cost it.
  bool dearer(int later, int cut) const {
    return bytes(later) > bytes(cut) || buffer_in_[index(later)] > buffer_in_[index(cut)] ||
           (handles_ && receiving_grows(later, cut));
  }
  // Whether every host that takes a stage also takes its rest after a cut that is not dearer, in no more time.
  bool nested() const { return nested_; }
  // Time of a layer on its fastest host, in any stage.
  double least(int layer) const { return least_[index(layer)]; }
  // Lower bound on the time of layers [first, last): each on its fastest host.
  double fastest(int first, int last) const { return fastest_[index(last)] - fastest_[index(first)]; }
  double link(int from_cls, int to_cls, int cut) const;
  LinkSpeed speed(int from_cls, int to_cls) const;
  // Time from the data host to the first stage and from the last stage back; 0 without a data host.
  double link_from_data(int cls) const { return from_data_[index(cls)]; }
  double link_to_data(int cls) const { return to_data_[index(cls)]; }
  // Time of a stage's link at a cut, as far as its own end determines it: exact if separable, else a bound.
  // At the ends it is at least the time of feeding or collecting, with the first or last stage on this class.
  double link_in(int cls, int cut) const;
  double link_out(int cls, int cut) const;

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  std::size_t row(int cls) const { return index(cls) * index(layers_ + 1); }
  bool receiving_grows(int later, int cut) const;
  bool bids_nested(const DeviceType& type) const;
  void measure_handling();
  void classify(const LinkTable& links);
  void measure_links(const LinkTable& links);

  const Problem& problem_;
  int layers_;
  bool pairwise_ = false;
  bool nested_ = true;
  std::vector<std::vector<int>> hosts_;
  std::vector<const DeviceType*> types_;
  std::vector<double> memory_;
  std::vector<double> bytes_, buffer_in_, buffer_out_;
  std::vector<double> least_;                   // time of each layer on its fastest host
  std::vector<double> fastest_;                 // lower bound for the layers before each cut
  bool handles_ = false;                        // whether some type has times for receiving
  std::vector<double> receive_, send_;          // [class, cut]
  std::vector<double> through_;                 // [class, cut]: seconds of the layers before
  int data_class_ = -1;
  DataWork data_;
  std::vector<double> from_data_, to_data_;
  std::vector<LinkSpeed> speeds_;               // pairwise only: [from * classes + to]
  std::vector<LinkSpeed> best_in_, best_out_;   // pairwise only: the best of each over all partners
};

}  // namespace pipeedge
