// What a stage and a schedule cost, stated once: the solver adds up the same terms in the same order as
// the tables and tests do, so that equal stages cost the same to the last bit.
#pragma once

#include <algorithm>
#include <vector>

#include "problem.hpp"

namespace pipeedge {

// Seconds of taking a microbatch from the link at a cut, and of passing it on there, on a host. Both are 0
// where the model begins or ends and nothing is counted, or on the data host itself.
double receive_seconds(const Problem& problem, int host, int cut);
double send_seconds(const Problem& problem, int host, int cut);

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
    if (!type_.activation_bytes.empty()) {
      activation_bytes_ = std::max(activation_bytes_, type_.activation_bytes[layer]);
    }
  }

  int first() const { return first_; }
  int last() const { return last_; }
  double layers_s() const { return layers_s_; }
  // Weights and the largest activation, without buffers.
  double held_bytes() const { return weight_bytes_ + activation_bytes_; }
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
  double activation_bytes_ = 0;
};

}  // namespace pipeedge
