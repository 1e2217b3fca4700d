// All allowed stages as a graph: nodes are cuts, and an arc is a stage on one class of hosts.
//
//   cut 0 --(class a: layers 1-3)--> cut 3 --(class b: layers 4-9)--> cut 9 ... --> cut L
//
// A schedule is a path from cut 0 to cut L that uses no resource (a class, or several interchangeable
// classes) more often than it has hosts. The network is built for one bottleneck T: all arcs cost at
// most T, so any path within the capacities is a schedule with that bottleneck or a better one.
//
// kFeasibility only asks whether such a path exists. So an arc is omitted if another arc of the same class
// is longer and ends at a cut that is not dearer than any cut it passes (Instance::dearer): whatever
// follows the shorter arc can also follow the longer one. (Being longer is not sufficient: the next host
// may be unable to use a dearer cut.) kLatency keeps all arcs with their seconds, and distinguishes the
// link of the last host.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "instance.hpp"

namespace pipeedge {

struct Step {                     // a stage of a path
  int cls = 0;
  int first = 0;
  int last = 0;
};
using Path = std::vector<Step>;

struct Arc {
  double cost = 0;                // contribution to the latency and reluctance in seconds; 0 for kFeasibility
  std::int32_t resource = 0;
  std::int32_t cls = 0;
  std::int32_t to = 0;
  std::int32_t sender = 0;        // the class of senders that this host belongs to
};

enum class Purpose { kFeasibility, kLatency };

class Network {
 public:
  // Omits stages that no schedule with a latency up to `latency_limit` can have. For kLatency, `reluctance` is
  // added to the seconds of every schedule without a stage on the data host.
  Network(const Instance& instance, double bottleneck, Purpose purpose, double latency_limit = kInfinity,
          double reluctance = 0);

  const Instance& instance() const { return instance_; }
  int layers() const { return instance_.layers(); }
  int resources() const { return static_cast<int>(capacity_.size()); }
  int capacity(int resource) const { return capacity_[static_cast<std::size_t>(resource)]; }
  int first_class(int resource) const { return classes_of_[static_cast<std::size_t>(resource)].front(); }
  // Arcs that leave a cut, grouped by class.
  const Arc* begin(int cut) const { return arcs_.data() + start_[static_cast<std::size_t>(cut)]; }
  const Arc* end(int cut) const { return arcs_.data() + start_[static_cast<std::size_t>(cut) + 1]; }
  const Arc& arc(int index) const { return arcs_[static_cast<std::size_t>(index)]; }
  int first_arc(int cut) const { return start_[static_cast<std::size_t>(cut)]; }
  // The smallest cost of a stage or link above the bottleneck; no value between the two can be an optimum.
  double next_bottleneck() const { return next_; }

  // Number of groups of classes with equal outgoing links. With one, no link depends on the previous host.
  int senders() const { return senders_; }
  // Seconds of the link before a stage at a cut > 0 (0 for kFeasibility); infinite if it is not allowed.
  double hop(int sender, int cls, int cut) const;
  // Smallest number of stages from a cut to the end, regardless of capacities.
  int min_stages(int cut) const { return min_stages_[static_cast<std::size_t>(cut)]; }

  // Whether a class may run this stage, even if the arc is omitted.
  bool allows(int cls, int first, int last) const;

  // Replaces the resources of merged classes with classes that have unused hosts, earliest first.
  Path path(const std::vector<int>& arcs) const;

 private:
  struct Hop {
    double seconds_per_byte = 0;
    double latency_s = 0;
  };
  // The stages that one class may run, by first layer, with their seconds for kLatency.
  struct ClassStages {
    std::vector<std::pair<int, int>> ends;
    std::vector<double> seconds;
  };
  bool by_reach() const {
    return purpose_ == Purpose::kFeasibility && !instance_.pairwise() && instance_.nested();
  }
  ClassStages collect(int cls);
  void add_resources(const std::vector<ClassStages>& stages);
  void add_arcs(const std::vector<ClassStages>& stages);
  void prepare_hops();
  void prepare_min_stages();
  void note(double cost) {
    if (cost > limit_ && cost < next_) next_ = cost;
  }

  const Instance& instance_;
  double limit_ = 0;              // the bottleneck plus its tolerance
  Purpose purpose_;
  double latency_limit_;
  double reluctance_;
  double next_ = kInfinity;
  int senders_ = 1;
  std::vector<int> sender_of_;    // sender group, by class
  std::vector<Hop> hops_;         // [sender * classes + class]; empty if links cost nothing
  std::vector<int> capacity_;
  std::vector<std::vector<int>> classes_of_;  // classes, by resource
  std::vector<int> start_;
  std::vector<Arc> arcs_;
  std::vector<int> min_stages_;
};

}  // namespace pipeedge
