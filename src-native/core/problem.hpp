// The scheduling problem and its solution as plain data: no I/O, no YAML, no threads.
//
//   input --> [ layers 1-12  ] --8 bits--> [ layers 13-30 ] --uncompressed--> [ layers 31-48 ] --> output
//             [ host a, int8 ]             [ host c, bf16 ]                   [ host b, f32  ]
//   seconds       stage             link        stage               link           stage
//   loss          stage        +    link   +    stage        +      link     +     stage        <= max_loss
//             \_________________________ microbatches of u items _________________________/
//
// A setting is one microbatch size and one number type, with the costs of all layers on all types of hosts that were
// profiled in it. A plan takes one microbatch size for all stages, for each stage a host and any number type that the
// host was profiled in at that size, and for each link between two stages one of the widths. A problem with one
// setting and one width is only a cut: layers 1..L are divided into consecutive ranges, one host each.
//
//   compute(s, h)  = overhead_s + receive_s[first layer] + sum of time_s[layer] + send_s[last layer], of h's type in
//                    the setting
//   link(a, b, n)  = n bytes / bandwidth(a, b) + latency(a, b)
//   feeding        = feed_s of the data host's type, plus input_send_s if the first stage is on another host
//   collecting     = collect_s of the data host's type, plus output_receive_s if the last stage is on another host
//   busy(s, h)     = compute(s, h), plus feeding + collecting on the data host
//   period         = max over stages (busy), links, feeding and collecting, times `waiting` (throughput = batch_size /
//                    period)
//   latency        = sum over all stages and links: one microbatch through an idle pipeline
//   loss           = sum over all stages (of their layers) and links (of their cuts, at their widths)
//   items/s        <= most_items / latency, if at most so many items are under way at a time, and a next one enters only
//                    when the data rank has collected one: the latency has feeding and collecting then, and the period
//                    is at least latency * batch_size / most_items. Tokens of texts are such items: a text goes on when
//                    its last token has come back
//   aside          = seconds of another kind of microbatch through the same plan, such as a chunk of a prompt: its own
//                    latency, plus for each further one that follows it the longest of its stages (with feeding and
//                    collecting on the data host), links, feeding and collecting
//   joules         = of a microbatch, for each host that is on: busy_w while it computes, idle_w for the rest of the
//                    period. On are the hosts with a stage, and the data host; links cost nothing
//
// bytes(cut) = elements * batch_size * element_bytes; for the input, input_bytes * batch_size if that is known, and
// likewise for the output. Where microbatches differ, as those of sentences do, links carry the part of it that they
// have on average, and times are averages, too. A link at a cut inside the model may carry fewer bytes: elements *
// batch_size * bits / 8, if that is less than uncompressed values of the sending stage take. A bandwidth of 0 carries
// nothing, and sending nothing costs only the latency. Without a data host, the first stage receives and the last one
// sends for free. With one, its links to the first stage and from the last one count, and are free if that stage runs
// on the data host itself. If settings of one microbatch size differ in the data rank's own work, the largest counts
// (feeding and collecting, both together, and what its links add, each by itself), as do the watts that it takes for
// that.
//
// A stage fits when  sum of weights and of what layers remember (state_bytes) + the largest activation_bytes of its layers
//                    + buffers_in * bytes(cut in) + buffers_out * bytes(cut out)
// is at most the type's mem_bytes. A layer that shares its weights with an earlier one of the stage counts as far as
// it is larger. Buffers count uncompressed, because a link may increase its bits during the run, and what arrives has
// the element size of the stage before. While a plan takes over from one that runs, a host also holds what it has of
// that one. A host runs one stage.
//
// Losses are parts of the answers that change. That they add up is an assumption; a plan has to be tried out.
//
// kThroughput minimises period / batch_size; ties are broken by the smallest loss, then the fewest hosts, then a stage
// on the data host, then the smallest latency. kLatency minimises the latency; ties are broken by the smallest loss,
// then the smallest period, then the fewest hosts, then a stage on the data host. kEnergy minimises joules /
// batch_size with a throughput of at least Options::min_items_per_s; ties are broken by the smallest loss. All keep
// max_loss, max_latency_s, and the largest seconds of each of `asides` and of any one of `either`. Except for kLatency, links finally get the most bits with which nothing but the latency
// grows. Hosts of a type are used in the order of the file. Values with a relative difference of at most 1e-9 are
// equal. kOptimal refers to the objective: ties are broken exactly except in the largest problems, where that effort
// is limited.
//
// Units are bytes, bytes per second and seconds throughout; layers are half-open [first, last) from 0.
// MB (2^20 bytes), Mbps (2^20 bits per second) and 1-based ranges are converted at the edge.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace pipeedge {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Model {
  std::vector<double> mem_bytes;     // weights of each layer
  std::vector<double> elements_out;  // elements per item that leave each layer
  double elements_in = 0;            // elements per item that enter the first layer
  // Empty, or for each layer the nearest earlier one with the same weights; kUnshared: none.
  std::vector<int> shared_with;

  static constexpr int kUnshared = -1;
  static constexpr int kMostLayers = 30'000;

  int layers() const { return static_cast<int>(mem_bytes.size()); }
};

// How the costs of a device type were measured, for reports; the solver does not use it.
struct ProfileNotes {
  std::string dtype;           // without "torch."; empty on a data host without a profile
  double threads = 0;          // number of threads; 0: unknown
  std::string kernels;         // empty: unknown
  std::vector<double> tokens;  // sentence lengths, shortest first
};

// Costs of one kind of host in one setting.
struct DeviceType {
  std::string name;
  double mem_bytes = 0;
  double bw_bytes_per_s = 0;         // of the host's interface, in each direction
  std::vector<double> weight_bytes;  // weights of each layer in this type's number type; empty: Model::mem_bytes
  std::vector<double> state_bytes;   // that each layer keeps between microbatches; empty: none
  std::vector<double> time_s;        // of each layer, for one microbatch
  double overhead_s = 0;             // of any stage for a microbatch, besides its layers and links
  // For each layer, or empty if unknown:
  std::vector<double> receive_s;         // taking a microbatch from a link, if the layer is a stage's first
  std::vector<double> send_s;            // passing it to a link, if the layer is a stage's last
  std::vector<double> activation_bytes;  // in use while the layer computes, besides weights and buffers
  std::vector<double> loss;              // of the answers, by computing it here; infinite: not allowed; empty: none
  // For a microbatch on the data host, in threads of their own:
  double feed_s = 0;            // reading the input and feeding it
  double collect_s = 0;         // collecting the results
  double input_send_s = 0;      // passing the input to a link, if the first stage is on another host
  double output_receive_s = 0;  // taking the outputs from a link, if the last stage is on another host
  // Empty, or [first * (layers + 1) + last]: a bid for each stage, infinite if the host does not take it. Bids
  // replace everything above: buffers do not count, and times and memory of layers should be 0.
  std::vector<double> stage_s;
  // Empty, or [first * (layers + 1) + last]: bytes that the host holds besides each stage, of a plan that still runs.
  std::vector<double> beside_bytes;
  double busy_w = -1;             // watts while a stage computes on it; negative: unknown
  double idle_w = 0;              // watts while it waits, at most those above if they are known
  double load_s_per_byte = 1e-8;  // of weights
  ProfileNotes notes;

  bool bids() const { return !stage_s.empty(); }
  double bid(int first, int last) const { return stage_s[stage_index(first, last)]; }
  double beside(int first, int last) const { return beside_bytes.empty() ? 0 : beside_bytes[stage_index(first, last)]; }
  std::size_t stage_index(int first, int last) const {
    return static_cast<std::size_t>(first) * (time_s.size() + 1) + static_cast<std::size_t>(last);
  }
};

struct Setting {
  static constexpr int kUnprofiled = -1;

  std::string dtype;
  double batch_size = 8;  // items in a microbatch
  double element_bytes = 4;
  double input_bytes = -1;   // of one item that enters the first layer; negative: elements_in * element_bytes
  double output_bytes = -1;  // of one item that leaves the last layer; negative: elements * element_bytes
  // Empty, or by cut 0..L: part of these bytes that a microbatch has on average. Buffers hold the largest one.
  std::vector<double> carried;
  // How many times as long the period is because no microbatch takes exactly as long as the mean, and what is ready
  // waits for what is not yet: at least 1, and equal for all settings of one microbatch size.
  double waiting = 1;
  double buffers_in = 2;          // microbatches that a stage buffers before itself
  double buffers_out = 2;         // ... and after itself
  std::vector<DeviceType> types;  // types without hosts are allowed
  std::vector<int> type_of;       // by host: index into types, or kUnprofiled

  // Null if the host was not profiled in this setting.
  const DeviceType* type(int host) const {
    const int index = type_of[static_cast<std::size_t>(host)];
    return index == kUnprofiled ? nullptr : &types[static_cast<std::size_t>(index)];
  }
};

// Another kind of microbatch that passes the same plan.
struct Aside {
  std::string name;
  std::vector<Setting> settings;  // what it costs, one for each number type of the problem's settings
  double repeats = 0;             // further ones that follow it
  double fixed_s = 0;             // seconds besides
  double max_s = kInfinity;       // longest time of all of them through the idle pipeline
  // Narrower limits of a part of the plans: of one microbatch's latency, and of each stage and link of its way.
  double latency_limit_s = kInfinity;
  double longest_limit_s = kInfinity;

  // The setting of a number type; null if there is none.
  const Setting* setting(const std::string& dtype) const {
    for (const Setting& one : settings) {
      if (one.dtype == dtype) return &one;
    }
    return nullptr;
  }
  bool limits() const { return max_s < kInfinity || latency_limit_s < kInfinity || longest_limit_s < kInfinity; }
};

// A directed link that overrides the bandwidth of the device types. Zero bandwidth means "no link".
struct Link {
  int from = 0;  // indices into Problem::hosts
  int to = 0;
  double bw_bytes_per_s = 0;
  double latency_s = 0;
};

// Bits that a link between two stages may have.
struct Width {
  int bits = 0;              // per value; 0: uncompressed
  std::vector<double> loss;  // by cut 0..L; infinite: not allowed there; empty: no loss

  double loss_at(int cut) const { return loss.empty() ? 0 : loss[static_cast<std::size_t>(cut)]; }
};

struct Problem {
  Model model;
  std::vector<std::string> hosts;  // names, in the order of the devices file
  std::vector<Setting> settings;
  std::vector<Link> links;  // empty: bandwidth(a, b) = min of the two types', latency 0
  int data_host = -1;       // index into hosts; -1: its links do not count
  std::vector<Width> widths{1};
  double max_loss = kInfinity;
  double max_latency_s = kInfinity;
  double most_items = kInfinity;  // under way at a time; finite: each enters when one before it has come back
  std::vector<Aside> asides;      // at most kMostAsides, with one of `either`
  std::vector<Aside> either;      // a plan has to keep the limits of one of these
  // By the number of stages, from 1; the last one is for more. What a decoder computes of a prompt until the first token,
  // and of all texts again once all caches are lost.
  std::vector<Aside> prompts, again;
  bool keeps_caches = true;   // whether hosts that keep layers keep their caches
  double partial_tokens = 0;  // tokens of all texts in pages that are not full, which are never copied

  static constexpr std::size_t kMostAsides = 2;

  bool returns() const { return most_items < kInfinity; }
  int layers() const { return model.layers(); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  const Setting& setting(int index) const { return settings[static_cast<std::size_t>(index)]; }
};

enum class Objective { kThroughput, kLatency, kEnergy };

struct Options {
  Objective objective = Objective::kThroughput;
  double min_items_per_s = 0;  // kEnergy: least throughput
  double time_limit_s = 10;    // wall clock; the best answer so far with its bound is returned
};

struct Stage {
  int host = 0;
  int first = 0;  // half-open, from 0
  int last = 0;
  int setting = 0;  // index into Problem::settings
  int width = 0;    // of the link to the next stage: index into Problem::widths
};

enum class Status {
  kOptimal,     // objective == lower bound (proven)
  kBounded,     // stopped at the time limit: objective >= optimum >= lower_bound
  kInfeasible,  // proven: no schedule exists
  kUnknown,     // stopped before a schedule was found or ruled out
};

struct Solution {
  Status status = Status::kUnknown;
  double batch_size = 0;
  std::vector<Stage> stages;
  double objective = kInfinity;  // seconds: period / batch_size, or latency; kEnergy: joules / batch_size
  double lower_bound = 0;
  double period_s = kInfinity;
  double latency_s = kInfinity;
  double loss = kInfinity;
  int fewest_stages = 0;  // kThroughput: no plan as fast, with no more loss, has fewer; 0: unknown
  double elapsed_s = 0;

  // (objective - lower_bound) / objective; 0 when proven, 1 when unknown.
  double gap() const;
  double items_per_s() const { return period_s > 0 ? batch_size / period_s : kInfinity; }
};

// Throws std::invalid_argument with a one-line message for data that breaks the rules above
// (sizes that differ, negative or non-finite numbers, indices out of range).
void validate(const Problem& problem);

// Hosts whose watts some setting does not state. kEnergy needs the watts of every host.
std::vector<int> hosts_without_watts(const Problem& problem);

Solution solve(const Problem& problem, const Options& options);

}  // namespace pipeedge
