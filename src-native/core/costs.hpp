// What a stage and a plan cost, stated once: the solver adds up the same terms in the same order as reports and tests
// do, so that equal stages cost the same to the last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "links.hpp"
#include "problem.hpp"

namespace pipeedge {

struct StageCost {
  double compute_s = 0;  // layers, overhead of a stage, receiving and sending
  double receive_s = 0;  // parts of it
  double send_s = 0;
  double data_s = 0;     // the data rank's own work on the same host
  double link_in_s = 0;  // 0 for the first stage without a data host
  double link_out_s = 0;
  double link_in_latency_s = 0;  // part of them in which the next transfer may follow
  double link_out_latency_s = 0;
  double output_bytes = 0;  // of a microbatch that leaves the stage
  double sent_bytes = 0;    // ... at the width of its link
  double mem_bytes = 0;     // weights + state + activations + buffers
  double state_bytes = 0;
  double activation_bytes = 0;
  double buffer_bytes = 0;
  double beside_bytes = 0;  // of the stage that runs on its host until this one takes over
  double load_bytes = 0;    // weights that its host does not have yet
  double mem_available_bytes = 0;
  double loss = 0;               // of the stage
  double link_loss = 0;          // of the link after it
  std::optional<double> joules;  // of its host, for a microbatch; none if its watts are unknown

  double busy_s() const { return compute_s + data_s; }
  double worst_s() const { return std::max({busy_s(), link_in_s, link_out_s}); }
};

// What an aside takes through a plan.
struct AsideCost {
  double latency_s = 0;  // of one microbatch
  double longest_s = 0;  // of its stages, links, feeding and collecting
  double total_s = 0;    // with those that follow it
};

struct Costs {
  std::vector<StageCost> stages;
  std::vector<AsideCost> asides;  // of Problem::asides
  std::vector<AsideCost> either;  // of Problem::either
  double feeding_s = 0;           // of the data rank, its link to the first stage included
  double collecting_s = 0;
  double period_s = 0;
  double latency_s = 0;
  double loss = 0;
  std::optional<double> joules;  // of all hosts that are on, for a microbatch; none if some watts are unknown

  bool fits() const;  // whether no stage takes more memory than its host has
};

// Whether costs keep the limits of the asides.
bool keeps_asides(const Problem& problem, const Costs& costs);

// Throws std::invalid_argument unless the stages cover the layers in order, each on a host of its own, in settings of
// one microbatch size.
Costs evaluate(const Problem& problem, const std::vector<Stage>& stages);
Costs evaluate(const Problem& problem, const LinkTable& links, const std::vector<Stage>& stages);

// What an aside takes through a plan of which only the layers from `first` to the one before `last` compute.
AsideCost aside_cost(const Problem& problem, const LinkTable& links, const std::vector<Stage>& stages,
                     const Aside& aside, int first, int last);

// Seconds of a stage before and after its layers, on a host: its overhead and taking a microbatch from the link at a cut;
// and passing it on. Links take none where the model begins or ends and nothing is counted, or on the data host itself.
double receive_seconds(const Problem& problem, const DeviceType& type, int host, int cut);
double send_seconds(const Problem& problem, const DeviceType& type, int host, int cut);

// Bytes of each layer's weights on hosts of a type.
const std::vector<double>& weights_on(const Problem& problem, const DeviceType& type);
// What a stage of this single layer holds on hosts of a type.
double layer_bytes(const Problem& problem, const Setting& setting, const DeviceType& type, int layer);
double stage_loss(const DeviceType& type, int first, int last);
// Joules that computing takes of a host, besides those of an idle one.
inline double busy_joules(const DeviceType& type, double seconds) { return (type.busy_w - type.idle_w) * seconds; }

// The data rank's own work for a microbatch, apart from a stage on its host. Without a data host, all is 0.
struct DataHost {
  double feed_s = 0;
  double collect_s = 0;
  double both_s = 0;        // feeding and collecting, without links
  double input_send_s = 0;  // what the links add, if they are used
  double output_receive_s = 0;
  double busy_w = 0;  // while it does this work; negative: unknown
  double idle_w = 0;  // while it waits; it is on in any plan

  // `first_away`, `last_away`: whether the first and the last stage are on other hosts.
  double feeding_s(bool first_away) const { return feed_s + (first_away ? input_send_s : 0); }
  double collecting_s(bool last_away) const { return collect_s + (last_away ? output_receive_s : 0); }
  double links_s(bool first_away, bool last_away) const {
    return (first_away ? input_send_s : 0) + (last_away ? output_receive_s : 0);
  }
  double total_s(bool first_away, bool last_away) const {
    return both_s + (first_away ? input_send_s : 0) + (last_away ? output_receive_s : 0);
  }
  // Lower bound for the period of any plan.
  double floor_s() const { return std::max(feed_s, collect_s); }
  // Joules of a microbatch, without those of links, and those that the links add.
  double joules(double period_s) const { return (busy_w - idle_w) * both_s + idle_w * period_s; }
  double link_joules(bool first_away, bool last_away) const {
    return (busy_w - idle_w) * links_s(first_away, last_away);
  }
};
DataHost data_host_of(const Problem& problem, double batch_size);
DataHost data_host_of(const Problem& problem, const Aside& aside);

// A stage on a device type, growing layer by layer from its first.
class GrowingStage {
 public:
  GrowingStage(const Problem& problem, const DeviceType& type, int first)
      : type_(type), weights_(weights_on(problem, type)), shared_with_(problem.model.shared_with), first_(first),
        last_(first) {}

  void add_layer() {
    const auto layer = static_cast<std::size_t>(last_++);
    layers_s_ += type_.time_s[layer];
    const int twin = shared_with_.empty() ? Model::kUnshared : shared_with_[layer];
    const double held = twin < first_ ? 0 : weights_[static_cast<std::size_t>(twin)];
    weight_bytes_ += std::max(0.0, weights_[layer] - held);
    if (!type_.state_bytes.empty()) state_bytes_ += type_.state_bytes[layer];
    if (!type_.activation_bytes.empty()) {
      activation_bytes_ = std::max(activation_bytes_, type_.activation_bytes[layer]);
    }
  }

  int first() const { return first_; }
  int last() const { return last_; }
  double layers_s() const { return layers_s_; }
  // Weights, what layers remember, and the largest activation, without buffers.
  double held_bytes() const { return weight_bytes_ + state_bytes_ + activation_bytes_; }
  double state_bytes() const { return state_bytes_; }
  double activation_bytes() const { return activation_bytes_; }
  // Seconds of the stage as it is now, or what the host bids for it.
  double seconds(double receive_s, double send_s) const {
    return type_.bids() ? type_.bid(first_, last_) : receive_s + layers_s_ + send_s;
  }

 private:
  const DeviceType& type_;
  const std::vector<double>& weights_;
  const std::vector<int>& shared_with_;
  int first_;
  int last_;
  double layers_s_ = 0;
  double weight_bytes_ = 0;
  double state_bytes_ = 0;
  double activation_bytes_ = 0;
};

// What a stage holds if values arrive in the number type of its setting.
double stage_bytes(const Problem& problem, const Setting& setting, const GrowingStage& stage);

// Values with a smaller relative difference are equal, such as sums of the same times in another order.
constexpr double kRelativeTolerance = 1e-9;

// A limit with its tolerance.
inline double loosened(double value) { return value + value * kRelativeTolerance; }
// A value that is less than another one, and not equal to it.
inline double just_below(double value) {
  if (value == kInfinity) return value;
  return value == 0 ? -std::numeric_limits<double>::min() : value - 2 * kRelativeTolerance * std::abs(value);
}

}  // namespace pipeedge
