// One plan for microbatch size, cut, hosts, number type of each stage and bits of each link.
//
//   input --> [ layers 1-12  ] --8 bits--> [ layers 13-30 ] --uncompressed--> [ layers 31-48 ] --> output
//             [ host a, int8 ]             [ host c, bf16 ]                   [ host b, f32  ]
//   seconds       stage             link        stage               link           stage
//   loss          stage        +    link   +    stage        +      link     +     stage        <= max_loss
//             \_________________________ microbatches of u items _________________________/
//
// A setting is one microbatch size and one number type, with the costs of all layers on all types of hosts that
// were profiled in it: a Problem (problem.hpp). A plan takes one microbatch size u for all stages, and for each
// stage any number type that its host was profiled in at u. For a plan,
//
//   seconds of a stage   as in problem.hpp, with the costs of its setting
//   seconds of a link    latency + bytes / bandwidth; uncompressed values have the element size of the sending
//                        stage, others `bits` per value; widths that are not smaller are not used
//   memory of a stage    as in problem.hpp; what arrives is buffered in the element size of the stage before
//   period               the longest stage (with the data rank's own work on its host) or link
//   latency              the sum over all stages and links
//   loss                 the sum over all stages and links: a stage has the losses of its layers in its number
//                        type, a link the loss of its cut at its width
//   joules               of a microbatch, for each host that is on: busy_w while it computes, idle_w for the rest
//                        of the period. On are the hosts with a stage, and the data host; links cost nothing
//
// Losses are parts of the answers that change. That they add up is an assumption; a plan has to be tried out.
// The data rank's own work, in seconds for a microbatch, is the largest that any setting of u states for it (feeding
// and collecting, both together, and what its links add, each by itself), as are the watts that it takes for that.
//
// kThroughput minimises period / u, kLatency the latency of one microbatch, kEnergy joules / u with a throughput
// of at least Options::min_items_per_s; all of them with a loss of at most max_loss and a latency of at most
// max_latency_s. kEnergy needs the watts of every host (unknown_watts). Ties are broken, as far as a limited effort
// goes, by the smallest loss, then (not for kEnergy) the fewest hosts, then a stage on the data host, then the
// smallest latency; except for kLatency, links finally get the most bits with which nothing but the latency grows.
// Values with a relative difference of at most 1e-9 are equal.
//
// The method (joint_network.hpp, joint_prices.hpp, joint_search.hpp):
//
//   for each u: is there a plan with period <= T, latency <= A, loss <= B?     bisection on T (or on A)
//       |            for one T, narrower links than needed are useless: a link is left with few choices
//       +-- prices of hosts, seconds and loss: prove "no", or come across a plan
//       +-- labels (cut, hosts used, sender, latency, loss): a label is dropped if another one is at least as good
//           in all of them (a Pareto front: losses are never rounded) or if the prices rule it out
//
// kEnergy asks for spans of periods instead (joint_energy.hpp).
//
// The answer is proven for one u as soon as "no" holds just below the best plan, and for all as soon as it does
// for each u. Otherwise the smallest limit with a "no" is the lower bound.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "problem.hpp"

namespace pipeedge {

struct Setting {
  Problem problem;                     // with the hosts that were profiled in this setting; no cut_bits
  std::string dtype;
  std::vector<std::vector<double>> loss;  // [type][layer]; infinite: not allowed; empty, also of a type: none
};

struct Width {
  int bits = 0;                        // per value; 0: uncompressed
  std::vector<double> loss;            // by cut 0..L; infinite: not allowed there; empty: no loss
};

struct NamedLink {
  std::string from;
  std::string to;
  double bw_bytes_per_s = 0;
  double latency_s = 0;
};

struct JointProblem {
  std::vector<Setting> settings;       // hosts with the same name are the same
  std::vector<NamedLink> links;        // in addition to those of settings, e.g. between hosts that share none
  std::vector<Width> widths;
  double max_loss = kInfinity;
  double max_latency_s = kInfinity;

  int layers() const { return settings.front().problem.model.layers(); }
};

struct JointStage {
  int host = 0;                        // index into host_names()
  int first = 0;                       // half-open, from 0
  int last = 0;
  int setting = 0;                     // index into JointProblem::settings
  int width = -1;                      // of the link after it: index into JointProblem::widths; -1 for the last stage
};

struct JointSolution {
  Status status = Status::kUnknown;
  double batch_size = 0;
  std::vector<JointStage> stages;
  double objective = kInfinity;        // seconds: period / batch_size, or latency; kEnergy: joules / batch_size
  double lower_bound = 0;
  double period_s = kInfinity;
  double latency_s = kInfinity;
  double loss = kInfinity;
  double elapsed_s = 0;

  double gap() const { return relative_gap(status, objective, lower_bound); }
};

struct JointStageCost {
  StageCost seconds;
  double loss = 0;                     // of the stage
  double link_loss = 0;                // of the link after it
  std::optional<double> joules;        // of its host, for a microbatch; none if its watts are unknown
};

struct JointCosts {
  std::vector<JointStageCost> stages;
  double period_s = 0;
  double latency_s = 0;
  double loss = 0;
  std::optional<double> joules;        // of all hosts that are on, for a microbatch; none if some watts are unknown
};

// Throws std::invalid_argument with a one-line message for data that breaks the rules above.
void validate(const JointProblem& problem);

// Names of all hosts of all settings, in the order in which they first appear.
std::vector<std::string> host_names(const JointProblem& problem);

// Hosts whose watts some setting does not state.
std::vector<std::string> unknown_watts(const JointProblem& problem);

// Costs of a plan whose stages have settings of one microbatch size.
JointCosts evaluate(const JointProblem& problem, const std::vector<JointStage>& stages);

JointSolution solve(const JointProblem& problem, const Options& options);

}  // namespace pipeedge
