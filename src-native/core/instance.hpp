// A problem at one microbatch size, prepared for search.
//
//   class    hosts that are equivalent: the same device types in all settings, neither is the data host, and swapping
//            them changes no link
//   mode     a class that computes in one setting
//   level    an element size of values that cross a cut
//   group    classes whose links are alike
//   sender   a group with the level of what it sends: all that a link needs to know of the stage before it
//
// Without a links table bytes / min(bw_u, bw_v) = max(bytes / bw_u, bytes / bw_v), so the time of a link splits into
// one term for each end; with a table that overrides bandwidths ("pairwise"), the previous host matters too.
#pragma once

#include <algorithm>
#include <vector>

#include "costs.hpp"
#include "links.hpp"
#include "problem.hpp"

namespace pipeedge {

struct Mode {
  int cls = 0;
  int setting = 0;  // index into Problem::settings
  int local = 0;    // ... and into those of the instance
  int level = 0;
  int group = 0;
  const DeviceType* type = nullptr;
};

// What a link may carry at a cut.
struct Load {
  double bytes = 0;
  double loss = 0;
  int width = 0;  // index into Problem::widths
};

class Instance {
 public:
  Instance(const Problem& problem, const LinkTable& links, double batch_size);

  const Problem& problem() const { return problem_; }
  double batch_size() const { return batch_size_; }
  // How many times as long the period is as the longest stage or link.
  double waiting() const { return waiting_; }
  int layers() const { return problem_.layers(); }
  bool pairwise() const { return pairwise_; }
  // No plan has more stages.
  int max_stages() const { return std::min(layers(), problem_.host_count()); }
  const DataHost& data() const { return data_; }
  // Whether some stage or link loses anything.
  bool loses() const { return loses_; }

  int classes() const { return static_cast<int>(hosts_.size()); }
  // Hosts of a class, in the order of the devices file.
  const std::vector<int>& hosts(int cls) const { return hosts_[index(cls)]; }
  int class_of(int host) const { return class_of_[index(host)]; }
  int count(int cls) const { return static_cast<int>(hosts(cls).size()); }
  // The class that consists of the data host; -1 without one.
  int data_class() const { return data_class_; }
  int settings() const { return static_cast<int>(settings_.size()); }

  const std::vector<Mode>& modes() const { return modes_; }
  const Mode& mode(int number) const { return modes_[index(number)]; }
  int mode_of_class(int cls) const { return first_mode_[index(cls)]; }  // the first of them; -1 if there is none
  int groups() const { return static_cast<int>(members_.size()); }
  int levels() const { return static_cast<int>(local_at_.size()); }
  int senders() const { return groups() * levels(); }
  int sender(const Mode& mode) const { return mode.group * levels() + mode.level; }
  // Whether whatever a sender can do another one can do at least as well.
  bool as_good(int sender, int other) const {
    return sender == other || (!as_good_.empty() && as_good_[index(sender) * index(senders()) + index(other)] != 0);
  }

  // A stage of a mode that begins at a layer; to be grown.
  GrowingStage stage_from(int mode, int first) const { return {problem_, *this->mode(mode).type, first}; }
  // The highest level of values that a stage may receive, as far as its memory goes; -1 if it does not fit.
  int room(int mode, const GrowingStage& stage) const {
    const DeviceType& type = *this->mode(mode).type;
    int level = levels() - 1;
    if (type.bids()) return level;
    const double held = stage.held_bytes() + type.beside(stage.first(), stage.last());
    const double* in = buffer_in_.data() + row(this->mode(mode).local) * index(levels()) + index(stage.first());
    const double out = buffer_out_[row(this->mode(mode).local) + index(stage.last())];
    while (level >= 0 && !(held + (in[row(level)] + out) <= memory_[index(mode)])) --level;
    return level;
  }
  // Whether weights and activations alone exceed the memory, so that no longer stage fits either.
  bool overfull(int mode, const GrowingStage& stage) const {
    return !this->mode(mode).type->bids() && stage.held_bytes() > memory_[index(mode)];
  }
  // Seconds of a stage, without and with the data rank's own work.
  double stage_seconds(int mode, const GrowingStage& stage) const {
    return stage.seconds(receive(mode, stage.first()), send_[row(mode) + index(stage.last())]);
  }
  double busy_seconds(int mode, const GrowingStage& stage) const {
    return stage_seconds(mode, stage) + data_seconds(mode, stage.first(), stage.last());
  }
  // Time of the data rank's own work beside a stage if it is on its host, else 0. A longer stage with the same
  // first layer does not have more of it.
  double data_seconds(int mode, int first, int last) const {
    return this->mode(mode).cls == data_class_ ? data_.total_s(first > 0, last < layers()) : 0;
  }
  // Time of taking a microbatch from the link at a cut.
  double receive(int mode, int cut) const { return receive_[row(mode) + index(cut)]; }
  // Whether continuing a plan from `later` could be worse than from `cut`, with the layers between them in the
  // previous stage: because more bytes are sent or buffered at `later`, or because some host needs more time to
  // receive them than those layers would have cost it. For a single setting.
  bool dearer(int later, int cut) const;
  // Whether every host that takes a stage also takes its rest after a cut that is not dearer, in no more time.
  bool nested() const { return nested_; }
  // Lower bound on the time of layers [first, last): each in its fastest mode.
  double fastest(int first, int last) const { return fastest_[index(last)] - fastest_[index(first)]; }
  // Lower bound on the period of every plan.
  double least_period() const;

  // What a link may carry at a cut inside the model: the least loss first, each with fewer bytes than the one before.
  const Load* loads_begin(int level, int cut) const { return loads_.data() + load_start_[load_index(level, cut)]; }
  const Load* loads_end(int level, int cut) const { return loads_.data() + load_start_[load_index(level, cut) + 1]; }
  // The fewest bytes of any of these at a level; infinite if there is none.
  double least_bytes(int level, int cut) const { return least_bytes_[load_index(level, cut)]; }
  // The link between two groups; without bandwidth where there is none, as from a single host to itself.
  LinkSpeed speed(int from_group, int to_group) const {
    return speeds_[index(from_group) * index(groups()) + index(to_group)];
  }
  // Time from the data host to a first stage and from a last stage back; 0 without a data host.
  double link_from_data(int mode) const { return from_data_[index(mode)]; }
  double link_to_data(int mode) const { return to_data_[index(mode)]; }
  // Time of a stage's link at a cut, as far as its own end determines it: a lower bound, and exact without a links
  // table, for one level and one width. At the ends it is at least the time of feeding or collecting.
  double link_in(int mode, int cut) const;
  double link_out(int mode, int cut) const;

  // Of an aside: the number of those of the problem, their seconds of a stage without and with the data rank's own work,
  // at the ends with the data rank's work and links, and the bytes of a link as a multiple of the microbatch's.
  int asides() const { return static_cast<int>(asides_.size()); }
  struct AsideStage {
    double latency_s = 0;  // with feeding, collecting and the data rank's links at the ends
    double longest_s = 0;
  };
  AsideStage aside_stage(int aside, int mode, int first, int last) const;
  double aside_bytes(int aside) const { return asides_[index(aside)].bytes; }

  // The period by every time of a stage or link, in [low, high) and clearly below high: no period lies between two.
  std::vector<double> periods_between(double low, double high) const;

 private:
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  // Of a table with a value for each cut.
  std::size_t row(int number) const { return index(number) * index(layers() + 1); }
  std::size_t load_index(int level, int cut) const { return row(level) + index(cut); }
  double bytes(int local, int cut) const { return bytes_[row(local) + index(cut)]; }
  void measure_buffers();
  void classify(const LinkTable& links);
  void add_modes(const LinkTable& links);
  void add_loads();
  void measure_links(const LinkTable& links);
  void bound_layers();
  void compare_senders();
  bool nests(int mode) const;
  void add_asides(const LinkTable& links);

  struct AsideTimes {
    DataHost data;
    double bytes = 1;                        // as a multiple of those of a microbatch
    std::vector<double> receive, send;       // [mode, cut]
    std::vector<double> through;             // [mode, cut]: seconds of the layers before
    std::vector<double> from_data, to_data;  // by mode
  };

  const Problem& problem_;
  double batch_size_;
  double waiting_ = 1;
  DataHost data_;
  bool pairwise_ = false;
  bool nested_ = true;
  bool loses_ = false;
  std::vector<int> settings_;              // those of this microbatch size
  std::vector<int> local_at_;              // some setting of each level, as an index into settings_
  std::vector<double> bytes_;              // [setting, cut]: of a microbatch in memory
  std::vector<double> buffer_in_;          // [setting, level, cut]: of what arrives, at the level of its sender
  std::vector<double> buffer_out_;         // [setting, cut]
  std::vector<double> memory_;             // by mode, with its tolerance
  std::vector<std::vector<int>> hosts_;    // by class
  std::vector<int> class_of_;              // by host
  std::vector<int> group_;                 // by class
  std::vector<std::vector<int>> members_;  // hosts, by group
  int data_class_ = -1;
  std::vector<Mode> modes_;
  std::vector<int> first_mode_;              // by class
  bool handles_ = false;                     // whether some type has times for receiving
  std::vector<double> receive_, send_;       // [mode, cut]
  std::vector<double> through_;              // [mode, cut]: seconds of the layers before
  std::vector<double> from_data_, to_data_;  // by mode
  std::vector<Load> loads_;
  std::vector<std::size_t> load_start_;        // [level, cut]
  std::vector<double> least_bytes_;            // [level, cut]
  std::vector<LinkSpeed> speeds_;              // [from, to]
  std::vector<LinkSpeed> best_in_, best_out_;  // the best of each over all partners of a group
  std::vector<double> fastest_;                // lower bound for the layers before each cut
  double longest_layer_ = 0;                   // on its fastest host
  std::vector<AsideTimes> asides_;
  std::vector<char> as_good_;  // [sender, sender]; empty where there are too many to compare
};

}  // namespace pipeedge
