// All allowed stages and links of a joint problem at one microbatch size, within limits.
//
//   cut 0 --(host a in int8: layers 1-12)--> cut 12 ==(8 bits)==> (host c in bfloat16: layers 13-30)--> cut 30 ...
//
// Arcs are stages, hops are links at one width. Both have amounts that add up along a plan: loss, seconds of
// latency, and one that depends on the question (a score for ties). No arc and no hop takes longer than the
// period or exceeds a limit by itself. Of the widths of a link, only those are kept of which none is better in
// all amounts: where latency has no limit, that is a single one.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "joint_instance.hpp"

namespace pipeedge {

enum Amount { kLoss = 0, kSeconds = 1, kScore = 2 };
constexpr int kAmounts = 3;
using Amounts = std::array<double, kAmounts>;

// Limits of a plan; infinite where there is none.
struct JointLimits {
  double period_s = kInfinity;
  Amounts most{kInfinity, kInfinity, kInfinity};
};

// Weights that make up the score.
struct Score {
  double stage = 0;                    // of each stage
  double away = 0;                     // of each stage that is not on the data host
  double second = 0;                   // of each second of latency
  double joule = 0;                    // of each joule of a stage, were this the period:
  double period_s = 0;
};

struct JointArc {
  Amounts amount{};
  std::int32_t mode = 0;
  std::int32_t cls = 0;
  std::int32_t group = 0;
  std::int32_t sender = 0;
  std::int32_t to = 0;
  std::int32_t room = 0;               // highest level of element sizes that it may receive
};

struct JointHop {
  Amounts amount{};
  std::int32_t width = 0;
};

class JointNetwork {
 public:
  JointNetwork(const JointInstance& instance, const JointLimits& limits, const Score& score = {});

  const JointInstance& instance() const { return instance_; }
  const JointLimits& limits() const { return limits_; }
  int layers() const { return instance_.layers(); }
  // Arcs that leave a cut, grouped by the group of their class.
  int first_arc(int cut) const { return start_[static_cast<std::size_t>(cut)]; }
  int end_arc(int cut) const { return start_[static_cast<std::size_t>(cut) + 1]; }
  const JointArc& arc(int index) const { return arcs_[static_cast<std::size_t>(index)]; }
  // Links from a sender to a group at a cut inside the model: [first_hop, end_hop).
  int first_hop(int cut, int sender, int group) const { return hop_start_[hop_index(cut, sender, group)]; }
  int end_hop(int cut, int sender, int group) const { return hop_start_[hop_index(cut, sender, group) + 1]; }
  const JointHop& hop(int index) const { return hops_[static_cast<std::size_t>(index)]; }
  // The smallest time of a stage or link above the period.
  double next_period() const { return next_; }

 private:
  std::size_t hop_index(int cut, int sender, int group) const {
    return (static_cast<std::size_t>(cut) * static_cast<std::size_t>(instance_.senders()) +
            static_cast<std::size_t>(sender)) * static_cast<std::size_t>(instance_.groups()) +
           static_cast<std::size_t>(group);
  }
  void add_arcs(int cut, int mode);
  double score_of(const Mode& mode, double busy_s, const JointArc& arc, int first) const;
  void add_hops(int cut, int sender, int group);
  bool allowed(double seconds);
  bool within(const Amounts& amount) const;

  const JointInstance& instance_;
  JointLimits limits_;
  Score score_;
  double longest_ = 0;                 // the period with its tolerance
  double next_ = kInfinity;
  std::vector<int> start_;
  std::vector<JointArc> arcs_;
  std::vector<int> hop_start_;
  std::vector<JointHop> hops_;
};

// A stage of a path: an arc, and the hop before it (-1 for the first).
struct JointStep {
  int arc = 0;
  int hop = -1;
};
using JointPath = std::vector<JointStep>;

Amounts amounts_of(const JointNetwork& network, const JointPath& path);
// Gives the hosts of each class to its stages, earliest first.
std::vector<JointStage> stages_of(const JointNetwork& network, const JointPath& path);

// A limit with its tolerance.
inline double with_tolerance(double limit) { return limit + limit * kRelativeTolerance; }

}  // namespace pipeedge
