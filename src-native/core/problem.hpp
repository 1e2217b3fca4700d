// The scheduling problem and its solution as plain data: no I/O, no YAML, no threads.
//
//   layers 1..L  -- cut into consecutive ranges -->  stages  -- one host each -->  schedule
//
//   compute(s, h)  = receive_s[first layer] + sum of time_s[layer] + send_s[last layer], of h's type
//   link(a, b, n)  = n bytes / bandwidth(a, b) + latency(a, b)
//   feeding        = feed_s of the data host's type, plus input_send_s if the first stage is on another host
//   collecting     = collect_s of the data host's type, plus output_receive_s if the last stage is on another host
//   busy(s, h)     = compute(s, h), plus feeding + collecting on the data host
//   cost(stage)    = max(busy, link in, link out)
//   cost(schedule) = max over stages, feeding and collecting (throughput = batch_size / cost)
//   latency        = sum over all stages and links: one microbatch through an idle pipeline
//
// bytes(cut) = elements * batch_size * element_bytes; for the input, input_bytes * batch_size if that is
// known, and likewise for the output. A link at a cut inside the model may carry fewer bytes:
// elements * batch_size * bits / 8. A bandwidth of 0 carries nothing, and sending nothing costs only the
// latency. Without a data host, the first stage receives and the last one sends for free. With one, its
// links to the first stage and from the last one count, and are free if that stage runs on the data host
// itself.
//
// A stage fits when  sum of weights + the largest activation_bytes of its layers
//                    + buffers_in * bytes(cut in) + buffers_out * bytes(cut out)
// is at most the type's mem_bytes. A layer that shares its weights with an earlier one of the stage counts as
// far as it is larger. Buffers count uncompressed, because a link may increase its bits during the run. A
// host runs one stage.
//
// kThroughput minimises the cost; ties are broken by the fewest hosts, then a stage on the data host, then
// the smallest latency. kLatency minimises the latency; ties are broken by the smallest cost, then the
// fewest hosts, then a stage on the data host. Hosts of a type are used in the order of the file. Values
// with a relative difference of at most 1e-9 are equal. kOptimal refers to the objective: ties are broken
// exactly except in the largest problems, where that effort is limited.
//
// Units are bytes, bytes per second and seconds throughout; layers are half-open [first, last) from 0.
// MB (2^20 bytes), Mbps (2^20 bits per second) and 1-based ranges are converted at the edge.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace pipeedge {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Model {
  std::vector<double> mem_bytes;        // weights of each layer
  std::vector<double> elements_out;     // elements per item that leave each layer
  double elements_in = 0;               // elements per item that enter the first layer
  // Empty, or for each layer the nearest earlier one with the same weights; kUnshared: none.
  std::vector<int> shared_with;

  static constexpr int kUnshared = -1;

  int layers() const { return static_cast<int>(mem_bytes.size()); }
};

struct DeviceType {
  std::string name;
  double mem_bytes = 0;
  double bw_bytes_per_s = 0;            // of the host's interface, in each direction
  std::vector<double> weight_bytes;     // weights of each layer in this type's number type; empty: Model::mem_bytes
  std::vector<double> time_s;           // of each layer, for one microbatch of Problem::batch_size
  // For each layer, or empty if unknown:
  std::vector<double> receive_s;        // taking a microbatch from a link, if the layer is a stage's first
  std::vector<double> send_s;           // passing it to a link, if the layer is a stage's last
  std::vector<double> activation_bytes; // in use while the layer computes, besides weights and buffers
  // For a microbatch on the data host, in threads of their own:
  double feed_s = 0;                    // reading the input and feeding it
  double collect_s = 0;                 // collecting the results
  double input_send_s = 0;              // passing the input to a link, if the first stage is on another host
  double output_receive_s = 0;          // taking the outputs from a link, if the last stage is on another host
  // Empty, or [first * (layers + 1) + last]: a bid for each stage, infinite if the host does not take it. Bids
  // replace everything above: buffers do not count, and times and memory of layers should be 0.
  std::vector<double> stage_s;
  double busy_w = -1;                   // watts while a stage computes on it; negative: unknown
  double idle_w = 0;                    // watts while it waits, at most those above if they are known

  bool bids() const { return !stage_s.empty(); }
  double bid(int first, int last) const {
    return stage_s[static_cast<std::size_t>(first) * (time_s.size() + 1) + static_cast<std::size_t>(last)];
  }
};

struct Host {
  std::string name;
  int type = 0;                         // index into Problem::types
};

// A directed link that overrides the bandwidth of the device types. Zero bandwidth means "no link".
struct Link {
  int from = 0;                         // indices into Problem::hosts
  int to = 0;
  double bw_bytes_per_s = 0;
  double latency_s = 0;
};

struct Problem {
  Model model;
  std::vector<DeviceType> types;        // types without hosts are allowed
  std::vector<Host> hosts;              // in the order of the devices file
  std::vector<Link> links;              // empty: bandwidth(a, b) = min of the two types', latency 0
  int data_host = -1;                   // index into hosts; -1: its links do not count
  double batch_size = 8;                // items in a microbatch
  double element_bytes = 4;
  double input_bytes = -1;              // of one item that enters the first layer; negative: elements_in * element_bytes
  double output_bytes = -1;             // of one item that leaves the last layer; negative: elements * element_bytes
  std::vector<int> cut_bits;            // [0, layers]: bits per value at each cut, 0 for uncompressed; empty: all uncompressed
  double buffers_in = 2;                // microbatches that a stage buffers before itself
  double buffers_out = 2;               // ... and after itself
};

enum class Objective { kThroughput, kLatency, kEnergy };  // kEnergy: only for joint plans

struct Options {
  Objective objective = Objective::kThroughput;
  double min_items_per_s = 0;           // kEnergy: least throughput
  double time_limit_s = 10;             // wall clock; the best answer so far with its bound is returned
};

struct Stage {
  int host = 0;
  int first = 0;                        // half-open, from 0
  int last = 0;
};

enum class Status {
  kOptimal,                             // objective == lower bound (proven)
  kBounded,                             // stopped at the time limit: objective >= optimum >= lower_bound
  kInfeasible,                          // proven: no schedule exists
  kUnknown,                             // stopped before a schedule was found or ruled out
};

// (objective - lower_bound) / objective; 0 when proven, 1 when unknown.
double relative_gap(Status status, double objective, double lower_bound);

struct Solution {
  Status status = Status::kUnknown;
  std::vector<Stage> stages;
  double objective = kInfinity;         // bottleneck_s or latency_s, by Options::objective
  double lower_bound = 0;
  double bottleneck_s = kInfinity;
  double latency_s = kInfinity;
  double elapsed_s = 0;

  double gap() const { return relative_gap(status, objective, lower_bound); }
};

// Costs of one stage of a schedule; the solver judges schedules by them too (costs.hpp).
struct StageCost {
  double compute_s = 0;                 // including receiving and sending
  double data_s = 0;                    // the data rank's own work on the same host
  double link_in_s = 0;                 // 0 for the first stage without a data host
  double link_out_s = 0;
  double mem_bytes = 0;                 // layers + activations + buffers
  double mem_available_bytes = 0;
  double busy_s() const { return compute_s + data_s; }
  double worst_s() const;
};

// Throws std::invalid_argument with a one-line message for data that breaks the rules above
// (sizes that differ, negative or non-finite numbers, indices out of range).
void validate(const Problem& problem);

std::vector<StageCost> evaluate(const Problem& problem, const std::vector<Stage>& stages);

Solution solve(const Problem& problem, const Options& options);

// Bytes of each layer's weights on hosts of a type.
const std::vector<double>& weights_on(const Problem& problem, const DeviceType& type);
// The data rank's own work for a microbatch, in seconds; all 0 without a data host.
struct DataWork {
  double feed_s = 0;
  double collect_s = 0;
  double both_s = 0;                    // feeding and collecting, without links
  double input_send_s = 0;              // what the links add, if they are used
  double output_receive_s = 0;

  // `first_away`, `last_away`: whether the first and the last stage are on other hosts.
  double feeding_s(bool first_away) const { return feed_s + (first_away ? input_send_s : 0); }
  double collecting_s(bool last_away) const { return collect_s + (last_away ? output_receive_s : 0); }
  double total_s(bool first_away, bool last_away) const {
    return both_s + (first_away ? input_send_s : 0) + (last_away ? output_receive_s : 0);
  }
  // Lower bound for the cost of any schedule.
  double floor_s() const { return std::max(feed_s, collect_s); }
};
DataWork data_work(const Problem& problem);

// The two objectives, for a schedule whose stages cost this.
double bottleneck_seconds(const Problem& problem, const std::vector<Stage>& stages,
                          const std::vector<StageCost>& costs);
double latency_seconds(const std::vector<StageCost>& costs);
// The largest activation of layers [first, last) on a type.
double activation_bytes(const DeviceType& type, int first, int last);

}  // namespace pipeedge
