#include "joint_report.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "../yaml/wording.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

const Setting& setting_of(const NamedJoint& joint, const JointStage& stage) {
  return joint.problem.settings[at(stage.setting)];
}

int bits_behind(const NamedJoint& joint, const JointStage& stage) {
  return stage.width < 0 ? 0 : joint.problem.widths[at(stage.width)].bits;
}

const char* objective_name(const Options& options) {
  switch (options.objective) {
    case Objective::kLatency: return "latency";
    case Objective::kEnergy: return "energy";
    case Objective::kThroughput: break;
  }
  return "throughput";
}

// A value of the objective, in words.
std::string objective_text(double objective, const Options& options) {
  switch (options.objective) {
    case Objective::kLatency: return "latency " + seconds_text(objective);
    case Objective::kEnergy: return energy_text(objective);
    case Objective::kThroughput: break;
  }
  return rate_text(1 / objective);
}

std::string bound_text(const JointSolution& solution, const Options& options) {
  switch (options.objective) {
    case Objective::kLatency: return seconds_text(solution.lower_bound) + " on the latency";
    case Objective::kEnergy: return energy_text(solution.lower_bound);
    case Objective::kThroughput: break;
  }
  return seconds_text(solution.lower_bound) + " an item";
}

// The device type of a stage, and the notes about it.
struct Device {
  std::string name;
  yaml::TypeNotes notes;
};
Device device_of(const NamedJoint& joint, const JointStage& stage, const std::string& host) {
  const Problem& own = setting_of(joint, stage).problem;
  const auto found = std::find_if(own.hosts.begin(), own.hosts.end(), [&](const Host& h) { return h.name == host; });
  return {own.types[at(found->type)].name, joint.notes[at(stage.setting)][at(found->type)]};
}

double items_per_s(const JointSolution& solution) {
  return solution.period_s > 0 ? solution.batch_size / solution.period_s : kInfinity;
}

std::string quality(const JointSolution& solution) {
  if (solution.status == Status::kOptimal) return "proven optimal";
  return "at most " + percent_text(solution.gap()) + " from the optimum";
}

std::string agreement_text(const NamedJoint& joint, double loss) {
  return joint.losses_known ? figure_text(std::max(0.0, 1 - loss)) : "unknown";
}

// What limits the period, in words.
std::string bottleneck_words(const std::vector<std::string>& names, const JointSolution& solution,
                             const JointCosts& costs) {
  const auto stage_words = [&](std::size_t s) {
    return "stage " + std::to_string(s) + " on " + yaml::printable(names[at(solution.stages[s].host)]);
  };
  const auto is_it = [&](double seconds) { return seconds >= costs.period_s * (1 - 1e-9); };
  const std::size_t last = costs.stages.size() - 1;
  for (std::size_t s = 0; s <= last; ++s) {
    const StageCost& cost = costs.stages[s].seconds;
    if (is_it(cost.busy_s())) return stage_words(s) + " computes " + seconds_text(cost.busy_s());
    if (s == 0 && is_it(cost.link_in_s)) {
      return "the link from the data host to " + stage_words(s) + " takes " + seconds_text(cost.link_in_s);
    }
    if (is_it(cost.link_out_s)) {
      return "the link from " + stage_words(s) + " to " + (s < last ? stage_words(s + 1) : "the data host") +
             " takes " + seconds_text(cost.link_out_s);
    }
  }
  return "the data host reads or collects for " + seconds_text(costs.period_s);
}

std::string next_best_line(const NamedJoint& joint, const NextBest& next, double today, const Options& options) {
  std::string line = next.choice + "; ";
  if (!next.feasible) return line + (next.planned_anew ? "no plan without it" : "nothing else keeps the limits");
  line += "next best: " + next.instead;
  if (!next.planned_anew) line += ", all else as it is";
  const bool rate = options.objective == Objective::kThroughput;
  const double ratio = rate ? today / next.objective : next.objective / today;
  line += ": " + objective_text(next.objective, options);
  if (std::isfinite(ratio)) line += std::string(" (") + (ratio >= 1 ? "+" : "") + percent_text(ratio - 1) + ")";
  if (joint.losses_known) line += ", agreement " + agreement_text(joint, next.loss);
  return line;
}

// "3.21 J an item: pi1 1.2, desk 2.01".
std::string energy_words(const NamedJoint& joint, const JointSolution& solution, const JointCosts& costs,
                         const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  double rest = *costs.joules;
  for (std::size_t s = 0; s < solution.stages.size(); ++s) {
    const double joules = *costs.stages[s].joules;
    parts.push_back(yaml::printable(names[at(solution.stages[s].host)]) + " " +
                    figure_text(joules / solution.batch_size));
    rest -= joules;
  }
  const Problem& first = setting_of(joint, solution.stages.front()).problem;
  const auto on_data = [&](const JointStage& stage) {
    return names[at(stage.host)] == first.hosts[at(first.data_host)].name;
  };
  if (first.data_host >= 0 && std::none_of(solution.stages.begin(), solution.stages.end(), on_data)) {
    parts.push_back("the data host " + figure_text(rest / solution.batch_size));
  }
  return energy_text(*costs.joules / solution.batch_size) + ": " + yaml::listing(parts, parts.size());
}

}  // namespace

std::string joint_yaml(const NamedJoint& joint, const JointSolution& solution) {
  const std::vector<std::string> names = host_names(joint.problem);
  const std::string size = figure_text(solution.batch_size);
  std::string text = "# microbatches of " + size + ": runtime.py -u " + size + "\n";
  for (const JointStage& stage : solution.stages) {
    text += "- " + yaml_name(names[at(stage.host)]) + ": [" + std::to_string(stage.first + 1) + ", " +
            std::to_string(stage.last) + "]\n";
    const int bits = bits_behind(joint, stage);
    if (bits != 0) text += "  quant_bits: " + std::to_string(bits) + "\n";
    const std::string& dtype = setting_of(joint, stage).dtype;
    if (dtype != "float32" && !dtype.empty()) text += "  dtype: " + dtype + "\n";
  }
  return text;
}

std::string joint_explanation(const NamedJoint& joint, const JointSolution& solution, const Options& options,
                              const std::vector<NextBest>& others, std::size_t room) {
  using Align = Table::Align;
  const std::vector<std::string> names = host_names(joint.problem);
  const JointCosts costs = evaluate(joint.problem, solution.stages);
  Table table({Align::kRight, Align::kLeft, Align::kLeft, Align::kLeft, Align::kLeft, Align::kRight, Align::kRight,
               Align::kRight, Align::kRight, Align::kRight},
              {8, 2, 9, 6, 4, 7});
  table.row({"stage", "host", "type", "layers", "dtype", "compute, s", "link out, s", "bits out", "loss",
             "memory, MB"});
  const bool data = joint.problem.settings.front().problem.data_host >= 0;
  for (std::size_t s = 0; s < solution.stages.size(); ++s) {
    const JointStage& stage = solution.stages[s];
    const JointStageCost& cost = costs.stages[s];
    const bool sends = s + 1 < solution.stages.size();
    const int bits = bits_behind(joint, stage);
    table.row({std::to_string(s), yaml::printable(names[at(stage.host)]),
               yaml::printable(device_of(joint, stage, names[at(stage.host)]).name),
               std::to_string(stage.first + 1) + "-" + std::to_string(stage.last), setting_of(joint, stage).dtype,
               microseconds_text(cost.seconds.busy_s()),
               sends || data ? microseconds_text(cost.seconds.link_out_s) : "-", bits == 0 ? "-" : std::to_string(bits),
               joint.losses_known ? figure_text(cost.loss + cost.link_loss) : "-",
               megabytes_text(cost.seconds.mem_bytes) + " of " + megabytes_text(cost.seconds.mem_available_bytes)});
  }
  std::string text = yaml::printable(joint.model) + ": " + std::to_string(joint.problem.layers()) +
                     " layers, planned jointly for " + objective_name(options) + "\n" +
                     table.text(room);
  text += "microbatch   " + figure_text(solution.batch_size) + " items\n";
  text += "bottleneck   " + bottleneck_words(names, solution, costs) + "\n";
  text += "throughput   " + rate_text(items_per_s(solution)) + "\n";
  text += "latency      " + seconds_text(solution.latency_s) + " for one microbatch through the idle pipeline\n";
  text += "agreement    " + agreement_text(joint, solution.loss) + " expected" +
          (joint.losses_known ? ", at least " + figure_text(1 - joint.problem.max_loss) + " wanted" : "") + "\n";
  if (costs.joules) text += "energy       " + energy_words(joint, solution, costs, names) + "\n";
  text += "lower bound  " + bound_text(solution, options) + ", gap " + percent_text(solution.gap()) + ": " + quality(solution) + "\n";
  text += "time spent   " + seconds_text(solution.elapsed_s) + "\n";
  for (const NextBest& next : others) {
    text += "chosen       " + next_best_line(joint, next, solution.objective, options) + "\n";
  }
  return text;
}

std::string joint_report_json(const NamedJoint& joint, const JointSolution& solution, const Options& options,
                              const std::vector<NextBest>& others) {
  const std::vector<std::string> names = host_names(joint.problem);
  const JointCosts costs = evaluate(joint.problem, solution.stages);
  JsonWriter json;
  json.open('{');
  json.key("model").value(joint.model);
  json.key("layers").value(joint.problem.layers());
  json.key("batch_size").value(solution.batch_size);
  json.key("objective").value(objective_name(options));
  json.key("status").value(solution.status == Status::kOptimal ? "optimal" : "bounded");
  json.key("schedule").open('[');
  for (std::size_t s = 0; s < solution.stages.size(); ++s) {
    const JointStage& stage = solution.stages[s];
    const JointStageCost& cost = costs.stages[s];
    const Device device = device_of(joint, stage, names[at(stage.host)]);
    json.open('{');
    json.key("stage").value(static_cast<int>(s));
    json.key("host").value(names[at(stage.host)]);
    json.key("type").value(device.name);
    json.key("layers").pair(stage.first + 1, stage.last);
    json.key("dtype").value(setting_of(joint, stage).dtype);
    json.key("quant_bits").value(bits_behind(joint, stage));
    json.key("compute_s").value(cost.seconds.compute_s);
    json.key("data_s").value(cost.seconds.data_s);
    json.key("link_in_s").value(cost.seconds.link_in_s);
    json.key("link_out_s").value(cost.seconds.link_out_s);
    json.key("loss").value(cost.loss);
    json.key("link_loss").value(cost.link_loss);
    if (cost.joules) json.key("joules").value(*cost.joules);
    json.key("mem_bytes").value(cost.seconds.mem_bytes);
    json.key("mem_available_bytes").value(cost.seconds.mem_available_bytes);
    if (device.notes.threads > 0) json.key("threads").value(device.notes.threads);
    if (!device.notes.kernels.empty()) json.key("kernels").value(device.notes.kernels);
    json.key("tokens").numbers(device.notes.tokens);
    json.close('}');
  }
  json.close(']');
  json.key("bottleneck").value(bottleneck_words(names, solution, costs));
  json.key("bottleneck_s").value(solution.period_s);
  json.key("throughput_items_per_s").value(items_per_s(solution));
  json.key("latency_s").value(solution.latency_s);
  json.key("loss").value(solution.loss);
  json.key("max_loss").value(joint.problem.max_loss);
  json.key("losses_known").value(joint.losses_known);
  const Problem& first = setting_of(joint, solution.stages.front()).problem;
  const DataWork data = data_work(first);
  const auto away = [&](const JointStage& stage) {
    return first.data_host < 0 || names[at(stage.host)] != first.hosts[at(first.data_host)].name;
  };
  json.key("feed_s").value(data.feeding_s(away(solution.stages.front())));
  json.key("collect_s").value(data.collecting_s(away(solution.stages.back())));
  if (costs.joules) json.key("joules_per_item").value(*costs.joules / solution.batch_size);
  const bool seconds = options.objective != Objective::kEnergy;
  json.key(seconds ? "objective_s" : "objective_j").value(solution.objective);
  json.key(seconds ? "lower_bound_s" : "lower_bound_j").value(solution.lower_bound);
  json.key("gap").value(solution.gap());
  json.key("elapsed_s").value(solution.elapsed_s);
  json.key("next_best").open('[');
  for (const NextBest& next : others) {
    json.open('{').key("choice").value(next.choice).key("instead").value(next.instead);
    json.key("feasible").value(next.feasible).key(seconds ? "objective_s" : "objective_j").value(next.objective);
    json.key("loss").value(next.loss).key("planned_anew").value(next.planned_anew).close('}');
  }
  json.close(']');
  json.key("left_out").open('[');
  for (const yaml::LeftOut& host : joint.left_out) {
    json.open('{').key("host").value(host.host).key("type").value(host.type).key("why").value(host.why).close('}');
  }
  json.close(']');
  json.key("warnings").open('[');
  for (const std::string& warning : joint.warnings) json.value(warning);
  json.close(']');
  json.close('}');
  return json.text();
}

std::string why_no_plan(const NamedJoint& joint, const Options& options) {
  Options quick = options;
  quick.time_limit_s = std::min(options.time_limit_s, 2.0);
  if (options.objective == Objective::kEnergy) {
    quick.objective = Objective::kThroughput;
    const JointSolution fastest = solve(joint.problem, quick);
    if (!fastest.stages.empty()) {
      return "none has a throughput of " + rate_text(options.min_items_per_s) + "; the fastest has " +
             rate_text(items_per_s(fastest)) + ": lower --min-throughput";
    }
  }
  JointProblem freed = joint.problem;
  freed.max_loss = kInfinity;
  if (!solve(freed, quick).stages.empty()) {
    return "none has an agreement of " + figure_text(1 - joint.problem.max_loss) +
           "; lower --min-agreement, or profile more number types and bits";
  }
  freed = joint.problem;
  freed.max_latency_s = kInfinity;
  const JointSolution slower = solve(freed, quick);
  if (!slower.stages.empty()) {
    return "none has a latency of at most " + seconds_text(joint.problem.max_latency_s) + "; one of " +
           seconds_text(slower.latency_s) + " exists";
  }
  return "the layers do not fit the hosts, or no links join these; sched-pipeline without --plan auto says more";
}

}  // namespace pipeedge::cli
