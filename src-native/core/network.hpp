// All allowed stages and links at one microbatch size as a graph: nodes are cuts, arcs are stages in one mode (a class
// of hosts and a setting), hops are links at one width.
//
//   cut 0 --(host a in int8: layers 1-12)--> cut 12 ==(8 bits)==> (host c in bfloat16: layers 13-30)--> cut 30 ... L
//
// A plan is a path from cut 0 to cut L that uses no resource (a class, or several interchangeable classes) more often
// than it has hosts. No arc and no hop takes longer than the period, so any path within the capacities has that period
// or a shorter one.
//
// Arcs and hops have amounts that add up along a plan: loss, seconds of latency, and a score that depends on the
// question. Only those that are limited, or to be made small, are kept ("active"). Arcs and hops that exceed a limit
// by themselves are omitted. Of the widths of a link, only those are kept of which none is better in all active
// amounts; without any, that is the narrowest one.
//
// Without active amounts, and where each end of a link bounds its time by itself, no hop depends on the stage before
// it: the network is not "linked". Then an arc is omitted if another arc of the same class is longer and ends at a cut
// that is not dearer than any cut it passes (Instance::dearer): whatever follows the shorter arc can also follow the
// longer one. (Being longer is not sufficient: the next host may be unable to use a dearer cut.)
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "instance.hpp"

namespace pipeedge {

// kAside and those after it are the seconds of the asides.
enum Amount : std::uint8_t { kLoss = 0, kSeconds = 1, kScore = 2, kAside = 3 };
constexpr std::size_t kAmounts = 3 + Problem::kMostAsides;
using Amounts = std::array<double, kAmounts>;

// Weights that make up the score.
struct Score {
  double second = 0;     // of each second of latency
  double elsewhere = 0;  // of a plan without a stage on the data host
  double joule = 0;      // of each joule of a stage, were this the period:
  double period_s = 0;

  bool any() const { return second > 0 || elsewhere > 0 || joule > 0; }
};

// Limits of a plan; infinite where there is none.
struct Limits {
  double period_s = kInfinity;
  Amounts most{kInfinity, kInfinity, kInfinity, kInfinity, kInfinity};
  Score score;
};

struct Arc {
  std::int32_t mode = 0;
  std::int16_t to = 0;
  std::int16_t room = 0;  // highest level of values that it may receive
};

// A stage of a path: an arc, and the width of the link before it.
struct Step {
  std::int32_t arc = -1;
  std::int32_t width = 0;
};

// The same, in any network of the instance.
struct PathStage {
  int mode = 0;
  int first = 0;
  int last = 0;
  int width = 0;  // of the link before it
};
using Path = std::vector<PathStage>;

class Network {
 public:
  // `least`: an amount to be made small, which is active even without a limit.
  Network(const Instance& instance, const Limits& limits, std::optional<Amount> least = std::nullopt);

  const Instance& instance() const { return instance_; }
  const Limits& limits() const { return limits_; }
  int layers() const { return instance_.layers(); }
  // Whether arcs stand for all arcs of a longer one's class, so that other hosts may take their place.
  bool linked() const { return linked_; }
  // Number of active amounts, which of all they are, and where an amount stands among them; -1 if it is not active.
  int active() const { return count_; }
  Amount amount(int k) const { return active_[static_cast<std::size_t>(k)]; }
  int place(Amount amount) const;

  int resources() const { return static_cast<int>(capacity_.size()); }
  // Number of hosts, at most that of layers.
  int capacity(int resource) const { return capacity_[static_cast<std::size_t>(resource)]; }
  int first_class(int resource) const { return classes_of_[static_cast<std::size_t>(resource)].front(); }
  // The resource of a class; -1 if the network has no arc of it.
  int resource_of_class(int cls) const { return resource_of_class_[static_cast<std::size_t>(cls)]; }

  // Arcs that leave a cut: [first_arc, end_arc).
  int first_arc(int cut) const { return start_[static_cast<std::size_t>(cut)]; }
  int end_arc(int cut) const { return start_[static_cast<std::size_t>(cut) + 1]; }
  const Arc& arc(int index) const { return arcs_[static_cast<std::size_t>(index)]; }
  const double* amounts(int arc) const {
    return amounts_.data() + static_cast<std::size_t>(arc) * static_cast<std::size_t>(count_);
  }
  int resource(const Arc& arc) const { return ends_[static_cast<std::size_t>(arc.mode)].resource; }
  // Where a stage stands as the sender and as the receiver of a link; 0 if the network is not linked.
  int sender(const Arc& arc) const { return ends_[static_cast<std::size_t>(arc.mode)].sender; }
  int group(const Arc& arc) const { return ends_[static_cast<std::size_t>(arc.mode)].group; }
  int senders() const { return linked_ ? instance_.senders() : 1; }
  int groups() const { return linked_ ? instance_.groups() : 1; }
  int levels() const { return linked_ ? instance_.levels() : 1; }

  // Calls visit(width, amounts) for each link from a sender to a group at a cut inside the model.
  template <typename Visit>
  void hops(int cut, int sender, int group, Visit visit) const {
    if (table_.empty()) return compute_hops(cut, sender, group, visit);
    const std::size_t index = hop_index(cut, sender, group);
    for (int hop = hop_start_[index]; hop < hop_start_[index + 1]; ++hop) {
      const Hop& found = table_[static_cast<std::size_t>(hop)];
      visit(found.width, found.amounts.data());
    }
  }

  // The smallest period above this one by the time of a stage or link; no value between the two can be an optimum.
  double next_period() const { return next_ * instance_.waiting(); }
  // Smallest number of stages from a cut to the end, regardless of capacities.
  int min_stages(int cut) const { return min_stages_[static_cast<std::size_t>(cut)]; }
  // Whether a mode may run this stage, even if the arc is omitted.
  bool allows(int mode, int first, int last) const;

  // Replaces the resources of merged classes with classes that have unused hosts, earliest first.
  Path path(const std::vector<Step>& steps) const;

 private:
  struct Speed {
    double s_per_byte = 0;
    double latency_s = 0;
  };
  struct Ends {
    int resource = -1;
    int sender = 0;
    int group = 0;
  };
  // Stages that one mode may run, by first layer, with their amounts.
  struct Found {
    std::int16_t first = 0;
    std::int16_t last = 0;
    std::int16_t room = 0;
  };
  struct ModeStages {
    std::vector<Found> stages;
    std::vector<double> amounts;
  };

  struct Hop {
    std::int32_t width = 0;
    Amounts amounts{};
  };

  template <typename Visit>
  void compute_hops(int cut, int sender, int group, Visit visit) const;
  std::size_t hop_index(int cut, int sender, int group) const {
    return (static_cast<std::size_t>(cut) * static_cast<std::size_t>(senders()) + static_cast<std::size_t>(sender)) *
               static_cast<std::size_t>(groups()) +
           static_cast<std::size_t>(group);
  }
  ModeStages collect(int mode);
  bool weigh(int mode, const GrowingStage& stage, double compute_s, double* amounts) const;
  bool weigh_hop(const Load& load, double seconds, const Speed& speed, double* amounts) const;
  double joules(int mode, double compute_s, bool begins, bool ends) const;
  void add_resources(const std::vector<ModeStages>& stages);
  void add_arcs(std::vector<ModeStages>& stages);
  void prepare_links();
  void prepare_table();
  void prepare_min_stages();
  void note(double seconds) {
    if (seconds > longest_ && seconds < next_) next_ = seconds;
  }

  const Instance& instance_;
  Limits limits_;
  std::vector<Amount> active_;
  int count_ = 0;  // of these
  std::array<int, kAmounts> place_{};
  bool linked_ = true;
  bool by_reach_ = false;
  bool timed_ = false;  // whether seconds matter
  bool narrowest_ = false;
  double longest_ = 0;                                     // of stages and links in the period, with its tolerance
  Amounts most_{};                                         // limits with their tolerance
  std::array<double, Problem::kMostAsides> longest_of_{};  // of stages and links, by aside
  double next_ = kInfinity;  // the shortest stage or link above it
  std::vector<Ends> ends_;      // by mode
  std::vector<Speed> speeds_;   // [from group, to group]
  std::vector<Hop> table_;      // empty where it would be too large
  std::vector<int> hop_start_;  // [cut, sender, group]
  std::vector<int> capacity_;
  std::vector<std::vector<int>> classes_of_;  // classes, by resource
  std::vector<int> resource_of_class_;
  std::vector<int> start_;
  std::vector<Arc> arcs_;
  std::vector<double> amounts_;
  std::vector<int> min_stages_;
};

template <typename Visit>
void Network::compute_hops(int cut, int sender, int group, Visit visit) const {
  double amounts[kAmounts] = {};
  const int level = linked_ ? sender % levels() : 0;
  const Load* load = instance_.loads_begin(level, cut);
  const Load* const end = instance_.loads_end(level, cut);
  // Without a limit on loss, the narrowest link is as good as any other.
  if (load != end && narrowest_) load = end - 1;
  if (!linked_) {
    if (load != end) visit(load->width, amounts);
    return;
  }
  const Speed& speed = speeds_[static_cast<std::size_t>(sender / levels()) * static_cast<std::size_t>(groups()) +
                               static_cast<std::size_t>(group)];
  for (; load != end; ++load) {
    const double seconds = load->bytes > 0 ? load->bytes * speed.s_per_byte + speed.latency_s : speed.latency_s;
    if (!(seconds <= longest_) || !weigh_hop(*load, seconds, speed, amounts)) continue;
    visit(load->width, amounts);
    if (!timed_) return;  // the others lose more
  }
}

// Gives the hosts of each class to its stages, in the order of the devices file.
std::vector<Stage> stages_of(const Instance& instance, const Path& path);

}  // namespace pipeedge
