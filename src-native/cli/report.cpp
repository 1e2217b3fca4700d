#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <sstream>
#include <utility>

#include "../core/links.hpp"
#include "../yaml/wording.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

const Host& host_of(const Problem& problem, const Stage& stage) {
  return problem.hosts[static_cast<std::size_t>(stage.host)];
}

const DeviceType& type_of(const Problem& problem, const Host& host) {
  return problem.types[static_cast<std::size_t>(host.type)];
}

std::string layers_text(const Stage& stage) {
  return std::to_string(stage.first + 1) + "-" + std::to_string(stage.last);
}

double items_per_s(const Problem& problem, const Solution& solution) {
  return solution.bottleneck_s > 0 ? problem.batch_size / solution.bottleneck_s : kInfinity;
}

// Bits per value on the link that leaves a stage; 0: uncompressed.
int bits_behind(const Problem& problem, const Stage& stage) {
  return problem.cut_bits.empty() ? 0 : problem.cut_bits[static_cast<std::size_t>(stage.last)];
}

double layer_bytes(const Problem& problem, const DeviceType& type, int layer) {
  return weights_on(problem, type)[static_cast<std::size_t>(layer)] +
         activation_bytes(type, layer, layer + 1) + buffer_bytes(problem, layer, layer + 1);
}

std::string stage_text(const Problem& problem, const std::vector<Stage>& stages, int index) {
  if (index == Bottleneck::kDataHost) {
    return "the data host " +
           yaml::printable(problem.hosts[static_cast<std::size_t>(problem.data_host)].name);
  }
  return "stage " + std::to_string(index) + " on " +
         yaml::printable(host_of(problem, stages[static_cast<std::size_t>(index)]).name);
}

// Seconds that the data rank takes to feed and to collect a microbatch of a schedule, its links included.
struct DataSeconds {
  double feeding = 0;
  double collecting = 0;
};

DataSeconds data_seconds(const Problem& problem, const std::vector<Stage>& stages) {
  const DataWork data = data_work(problem);
  return {data.feeding_s(stages.front().host != problem.data_host),
          data.collecting_s(stages.back().host != problem.data_host)};
}

Bottleneck find_bottleneck(const Problem& problem, const std::vector<Stage>& stages,
                           const std::vector<StageCost>& costs) {
  Bottleneck worst;
  worst.seconds = -1;
  const auto consider = [&](Bottleneck::Kind kind, int stage, int to, double seconds) {
    if (seconds > worst.seconds) worst = {kind, stage, to, seconds, ""};
  };
  const int last = static_cast<int>(stages.size()) - 1;
  for (int i = 0; i <= last; ++i)
    consider(Bottleneck::Kind::kCompute, i, i, costs[static_cast<std::size_t>(i)].busy_s());
  consider(Bottleneck::Kind::kLink, Bottleneck::kDataHost, 0, costs.front().link_in_s);
  for (int i = 0; i <= last; ++i) {
    consider(Bottleneck::Kind::kLink, i, i < last ? i + 1 : Bottleneck::kDataHost,
             costs[static_cast<std::size_t>(i)].link_out_s);
  }
  const DataSeconds data = data_seconds(problem, stages);
  consider(Bottleneck::Kind::kData, Bottleneck::kDataHost, Bottleneck::kDataHost,
           std::max(data.feeding, data.collecting));
  const std::string from = stage_text(problem, stages, worst.stage);
  const std::string seconds = seconds_text(worst.seconds);
  switch (worst.kind) {
    case Bottleneck::Kind::kCompute: {
      const double beside = costs[static_cast<std::size_t>(worst.stage)].data_s;
      worst.words = from + " computes " + seconds +
                    (beside > 0 ? ", of which reading and collecting take " + seconds_text(beside) : "");
      break;
    }
    case Bottleneck::Kind::kLink:
      worst.words = "the link from " + from + " to " + stage_text(problem, stages, worst.to) + " takes " + seconds;
      break;
    case Bottleneck::Kind::kData:
      worst.words =
          from + (data.feeding >= data.collecting ? " reads the input in " : " collects the results in ") + seconds;
      break;
  }
  return worst;
}

// Explains why the best schedule does not use a host of this type. The specific reasons are exact: they hold
// for every stage that the host could run.
std::string why_unused(const Problem& problem, const DeviceType& type, Objective objective,
                       const Solution& solution) {
  const int layers = problem.model.layers();
  double least_bytes = kInfinity;
  double fastest = kInfinity;
  double total = 0;
  double smallest_cut = kInfinity;     // bytes of the cheapest cut inside the model
  for (int l = 0; l < layers; ++l) {
    const double time = type.time_s[static_cast<std::size_t>(l)];
    least_bytes = std::min(least_bytes, layer_bytes(problem, type, l));
    fastest = std::min(fastest, time);
    total += time;
    if (l > 0) smallest_cut = std::min(smallest_cut, link_bytes(problem, l));
  }
  if (least_bytes > type.mem_bytes) {
    return "its " + megabytes_text(type.mem_bytes) +
           " MB hold no layer with its buffers; the smallest needs " + megabytes_text(least_bytes) + " MB";
  }
  const bool by_type = problem.links.empty();
  if (by_type && type.bw_bytes_per_s <= 0 && smallest_cut > 0) return "it has no bandwidth";
  if (objective == Objective::kThroughput) {
    const double period = solution.bottleneck_s;
    if (fastest >= period) {
      return "too slow: its fastest layer computes " + seconds_text(fastest) + ", the bottleneck is " +
             seconds_text(period);
    }
    const double link = link_seconds(smallest_cut, type.bw_bytes_per_s, 0);
    if (by_type && link >= period && total >= period) {
      return "its link is too slow: the smallest cut takes " + seconds_text(link) + ", the bottleneck is " +
             seconds_text(period);
    }
    return solution.status == Status::kOptimal
               ? "not needed: no schedule with it passes the bottleneck of " + seconds_text(period)
               : "no better schedule with it was found within the time limit";
  }
  return solution.status == Status::kOptimal ? "not needed: no schedule with it has a lower latency"
                                             : "no better schedule with it was found within the time limit";
}

// The smallest factor of all hosts' memory that makes the problem feasible, by bisection; 0 if memory does
// not help. Undecided trials count as infeasible, so the result may be too large.
double memory_factor(Problem problem) {
  Options options;
  options.time_limit_s = 0.1;
  const std::vector<DeviceType> types = problem.types;
  const auto feasible = [&](double factor) {
    for (std::size_t t = 0; t < types.size(); ++t) problem.types[t].mem_bytes = types[t].mem_bytes * factor;
    return !solve(problem, options).stages.empty();
  };
  double enough = 1;
  for (int doublings = 0; !feasible(enough); ++doublings, enough *= 2) {
    if (doublings == 20) return 0;
  }
  double short_of = enough / 2;
  for (int i = 0; i < 8; ++i) {
    const double middle = (short_of + enough) / 2;
    (feasible(middle) ? enough : short_of) = middle;
  }
  return enough;
}

const char* bottleneck_kind(Bottleneck::Kind kind) {
  switch (kind) {
    case Bottleneck::Kind::kCompute: return "compute";
    case Bottleneck::Kind::kLink: return "link";
    case Bottleneck::Kind::kData: return "data";
  }
  return "";
}

const char* objective_name(Objective objective) {
  return objective == Objective::kLatency ? "latency" : "throughput";
}

}  // namespace

double Report::items_per_s() const {
  return cli::items_per_s(problem, solution);
}

Report make_report(const NamedProblem& named, const Problem& problem, Objective objective,
                   const Solution& solution) {
  const yaml::Assembly& assembly = named.assembly;
  Report report{named.model, named.dtype, objective, problem,
                solution,      evaluate(problem, solution.stages),            {},        {}};
  report.bottleneck = find_bottleneck(report.problem, solution.stages, report.costs);
  std::vector<bool> used(report.problem.hosts.size(), false);
  for (const Stage& stage : solution.stages) used[static_cast<std::size_t>(stage.host)] = true;
  std::vector<std::string> why(report.problem.types.size());
  for (std::size_t h = 0; h < used.size(); ++h) {
    if (used[h]) continue;
    const Host& host = report.problem.hosts[h];
    const DeviceType& type = type_of(report.problem, host);
    if (type.bids()) continue;         // a data host without a profile is among those left out
    std::string& reason = why[static_cast<std::size_t>(host.type)];
    if (reason.empty()) reason = why_unused(report.problem, type, objective, solution);
    report.unused.push_back({host.name, type.name, reason});
  }
  report.unused.insert(report.unused.end(), assembly.left_out.begin(), assembly.left_out.end());
  return report;
}

namespace {

// Smallest size of a layer's weights on any host, beside those of the layer that it shares them with.
double least_weights(const Problem& problem, int layer) {
  double least = kInfinity;
  const std::vector<int>& shared = problem.model.shared_with;
  const int twin = shared.empty() ? Model::kUnshared : shared[static_cast<std::size_t>(layer)];
  for (const Host& host : problem.hosts) {
    const std::vector<double>& sizes = weights_on(problem, type_of(problem, host));
    const double held = twin == Model::kUnshared ? 0 : sizes[static_cast<std::size_t>(twin)];
    least = std::min(least, std::max(0.0, sizes[static_cast<std::size_t>(layer)] - held));
  }
  return least;
}

// "layer 3 fits on no host: ..."; empty if it fits on one.
std::string fits_nowhere(const Problem& problem, int layer) {
  const DeviceType* nearest = nullptr;  // type of the host that lacks the least memory
  const auto missing = [&](const DeviceType& type) { return layer_bytes(problem, type, layer) - type.mem_bytes; };
  for (const Host& host : problem.hosts) {
    const DeviceType& type = type_of(problem, host);
    if (nearest == nullptr || missing(type) < missing(*nearest)) nearest = &type;
  }
  if (nearest == nullptr || missing(*nearest) <= 0) return "";
  return "layer " + std::to_string(layer + 1) + " fits on no host: it needs " +
         megabytes_text(layer_bytes(problem, *nearest, layer)) + " MB with its buffers, the largest host has " +
         megabytes_text(nearest->mem_bytes) + " MB";
}

}  // namespace

std::string why_infeasible(const Problem& problem) {
  const auto bids = [&](const Host& host) { return type_of(problem, host).bids(); };
  if (std::all_of(problem.hosts.begin(), problem.hosts.end(), bids)) {
    return "no chain of stages that hosts bid for, each on its own host, covers all layers over links that carry "
           "them";
  }
  double available = 0;
  for (const Host& host : problem.hosts) available += type_of(problem, host).mem_bytes;
  double weights = 0;
  for (int l = 0; l < problem.model.layers(); ++l) {
    weights += least_weights(problem, l);
    if (const std::string why = fits_nowhere(problem, l); !why.empty()) return why;
  }
  const std::string hosts =
      std::to_string(problem.hosts.size()) + (problem.hosts.size() == 1 ? " host" : " hosts");
  if (weights > available) {
    return megabytes_text(weights - available) + " MB of memory are missing: the layers need " +
           megabytes_text(weights) + " MB without buffers, " + hosts + " together have " +
           megabytes_text(available) + " MB";
  }
  Problem connected = problem;
  constexpr double kPlenty = 1e18;     // bytes per second
  for (DeviceType& type : connected.types) type.bw_bytes_per_s = kPlenty;
  for (Link& link : connected.links) link.bw_bytes_per_s = kPlenty;
  Options options;
  options.time_limit_s = 2;
  if (!solve(connected, options).stages.empty()) {
    return "the memory is enough, but no links with bandwidth join the hosts it takes";
  }
  const double factor = memory_factor(connected);
  if (factor > 0) {
    return "about " + megabytes_text(available * (factor - 1)) +
           " MB of memory are missing: cut into stages with their "
           "buffers, the layers fit when each host has " +
           percent_text(factor - 1) + " more than now (" + megabytes_text(available) + " MB on " + hosts +
           ")";
  }
  return "no cut of the layers fits the hosts";
}

std::string quality_text(const Solution& solution) {
  if (solution.status == Status::kOptimal) return "proven optimal";
  return "at most " + percent_text(solution.gap()) + " from the optimum";
}

std::string schedule_yaml(const Problem& problem, const std::vector<Stage>& stages) {
  std::string text;
  for (const Stage& stage : stages) {
    text += "- " + yaml_name(host_of(problem, stage).name) + ": [" + std::to_string(stage.first + 1) + ", " +
            std::to_string(stage.last) + "]\n";
    const int bits = bits_behind(problem, stage);
    if (bits != 0) text += "  quant_bits: " + std::to_string(bits) + "\n";
  }
  return text;
}

namespace {

// The stages with their costs, a row each.
std::string stage_table(const Report& report, std::size_t room) {
  using Align = Table::Align;
  const Problem& problem = report.problem;
  const Solution& solution = report.solution;
  const std::size_t last = solution.stages.size() - 1;
  const bool data = problem.data_host >= 0;
  Table table({Align::kRight, Align::kLeft, Align::kLeft, Align::kLeft, Align::kRight, Align::kRight,
               Align::kRight, Align::kRight, Align::kRight, Align::kRight},
              {9, 5, 7, 2, 8, 6});
  table.row({"stage", "host", "type", "layers", "compute, s", "link in, s", "link out, s", "bits out",
             "memory, MB", "slack, s"});
  for (std::size_t i = 0; i <= last; ++i) {
    const Stage& stage = solution.stages[i];
    const StageCost& cost = report.costs[i];
    const Host& host = host_of(problem, stage);
    table.row({std::to_string(i), yaml::printable(host.name), yaml::printable(type_of(problem, host).name),
               layers_text(stage), microseconds_text(cost.busy_s()),
               i > 0 || data ? microseconds_text(cost.link_in_s) : "-",
               i < last || data ? microseconds_text(cost.link_out_s) : "-",
               bits_behind(problem, stage) != 0 ? std::to_string(bits_behind(problem, stage)) : "-",
               megabytes_text(cost.mem_bytes) + " of " + megabytes_text(cost.mem_available_bytes),
               microseconds_text(solution.bottleneck_s - cost.worst_s())});
  }
  return table.text(room);
}

std::string data_host_line(const Problem& problem, const Solution& solution) {
  const Host& host = problem.hosts[static_cast<std::size_t>(problem.data_host)];
  const DataSeconds data = data_seconds(problem, solution.stages);
  const auto stage = std::find_if(solution.stages.begin(), solution.stages.end(),
                                  [&](const Stage& one) { return one.host == problem.data_host; });
  return "data host    " + yaml::printable(host.name) +
         (data.feeding + data.collecting > 0
              ? ": feeding takes " + seconds_text(data.feeding) + ", collecting " + seconds_text(data.collecting)
              : std::string(": its profile does not say what feeding and collecting take")) +
         (stage == solution.stages.end()
              ? std::string("; no stage is there")
              : "; it runs stage " + std::to_string(stage - solution.stages.begin())) +
         "\n";
}

// Hosts that are unused for the same reason share a line.
std::string unused_lines(const std::vector<yaml::LeftOut>& unused) {
  std::string text;
  for (std::size_t i = 0; i < unused.size(); ++i) {
    const std::string& why = unused[i].why;
    const auto same_why = [&](const yaml::LeftOut& host) { return host.why == why; };
    if (std::any_of(unused.begin(), unused.begin() + static_cast<std::ptrdiff_t>(i), same_why)) continue;
    std::vector<std::string> names;
    bool one_type = true;
    for (const yaml::LeftOut& host : unused) {
      if (!same_why(host)) continue;
      names.push_back(yaml::printable(host.host));
      one_type = one_type && host.type == unused[i].type;
    }
    text += "unused       " + yaml::listing(names, names.size()) +
            (one_type ? " (" + yaml::printable(unused[i].type) + ")" : "") + ": " + why + "\n";
  }
  return text;
}

}  // namespace

std::string in_one_line(const std::string& schedule) {
  std::string text;
  std::istringstream lines(schedule);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 2, "- ") == 0) text += (text.empty() ? "" : ", ") + line.substr(2);
    if (line.compare(0, 2, "  ") == 0) text += line.substr(1);
  }
  return text;
}

std::string explanation(const Report& report, std::size_t room) {
  const Problem& problem = report.problem;
  const Solution& solution = report.solution;
  std::string text = yaml::printable(report.model) + ": " + std::to_string(problem.model.layers()) +
                     (problem.model.layers() == 1 ? " layer" : " layers") + ", microbatches of " +
                     std::to_string(static_cast<long long>(problem.batch_size)) + ", " + report.dtype +
                     ", for " + objective_name(report.objective) + "\n" + stage_table(report, room);
  if (problem.data_host >= 0) text += data_host_line(problem, solution);
  text += "bottleneck   " + report.bottleneck.words + "\n";
  text += "throughput   " + rate_text(report.items_per_s()) + "\n";
  text +=
      "latency      " + seconds_text(solution.latency_s) + " for one microbatch through the idle pipeline\n";
  text += "lower bound  " + seconds_text(solution.lower_bound) + " on the " +
          (report.objective == Objective::kLatency ? "latency" : "bottleneck") + ", gap " +
          percent_text(solution.gap()) + ": " + quality_text(solution) + "\n";
  text += "time spent   " + seconds_text(solution.elapsed_s) + "\n";
  return text + unused_lines(report.unused);
}

std::string what_if_line(const WhatIf& what_if, Objective objective, bool feasible_today,
                         const Solution& today, double items_per_s_today) {
  const bool latency = objective == Objective::kLatency;
  const auto figure = [&](double rate, const Solution& solution) {
    return latency ? rate_text(rate) + " at a latency of " + seconds_text(solution.latency_s)
                   : rate_text(rate);
  };
  std::string line = "what if " + yaml::printable(what_if.text, 400) + ": ";
  line += what_if.feasible ? figure(what_if.items_per_s, what_if.solution) : "no feasible schedule";
  line += ", today " + (feasible_today ? figure(items_per_s_today, today) : std::string("none"));
  if (what_if.feasible && feasible_today) {
    const double ratio =
        latency ? what_if.solution.latency_s / today.latency_s : what_if.items_per_s / items_per_s_today;
    if (std::isfinite(ratio))
      line += std::string(" (") + (ratio >= 1 ? "+" : "") + percent_text(ratio - 1) + ")";
    if (what_if.solution.status != Status::kOptimal) line += ", " + quality_text(what_if.solution);
  }
  if (!what_if.feasible && !what_if.why.empty()) line += ": " + what_if.why;
  return line;
}

std::string no_schedule_json(Status status) {
  JsonWriter json;
  json.open('{');
  json.key("status").value(status == Status::kInfeasible ? "infeasible" : "unknown");
  json.close('}');
  return json.text();
}

std::string report_json(const Report& report, const std::vector<std::string>& warnings,
                        const Questions& questions) {
  const Problem& problem = report.problem;
  const Solution& solution = report.solution;
  const DataSeconds data = data_seconds(problem, solution.stages);
  JsonWriter json;
  const auto stage_or_data = [&](int stage) {
    if (stage == Bottleneck::kDataHost) {
      json.value("data host");
    } else {
      json.value(stage);
    }
  };
  const auto status = [](const Solution& of) {
    return of.status == Status::kOptimal ? "optimal" : "bounded";
  };

  json.open('{');
  json.key("model").value(report.model);
  json.key("layers").value(problem.model.layers());
  json.key("batch_size").value(problem.batch_size);
  json.key("dtype").value(report.dtype);
  json.key("objective").value(objective_name(report.objective));
  json.key("status").value(status(solution));
  json.key("schedule").open('[');
  for (std::size_t i = 0; i < solution.stages.size(); ++i) {
    const Stage& stage = solution.stages[i];
    const StageCost& cost = report.costs[i];
    const Host& host = host_of(problem, stage);
    json.open('{');
    json.key("stage").value(static_cast<int>(i));
    json.key("host").value(host.name);
    json.key("type").value(type_of(problem, host).name);
    json.key("layers").pair(stage.first + 1, stage.last);
    json.key("compute_s").value(cost.compute_s);
    json.key("data_s").value(cost.data_s);
    json.key("link_in_s").value(cost.link_in_s);
    json.key("link_out_s").value(cost.link_out_s);
    json.key("quant_bits").value(bits_behind(problem, stage));
    json.key("mem_bytes").value(cost.mem_bytes);
    json.key("mem_available_bytes").value(cost.mem_available_bytes);
    json.key("slack_s").value(solution.bottleneck_s - cost.worst_s());
    json.close('}');
  }
  json.close(']');
  json.key("bottleneck").open('{');
  json.key("kind").value(bottleneck_kind(report.bottleneck.kind));
  json.key("stage");
  stage_or_data(report.bottleneck.stage);
  if (report.bottleneck.kind == Bottleneck::Kind::kLink) {
    json.key("to_stage");
    stage_or_data(report.bottleneck.to);
  }
  json.key("seconds").value(report.bottleneck.seconds);
  json.key("words").value(report.bottleneck.words);
  json.close('}');
  json.key("feed_s").value(data.feeding);
  json.key("collect_s").value(data.collecting);
  json.key("bottleneck_s").value(solution.bottleneck_s);
  json.key("throughput_items_per_s").value(report.items_per_s());
  json.key("latency_s").value(solution.latency_s);
  json.key("lower_bound_s").value(solution.lower_bound);
  json.key("gap").value(solution.gap());
  json.key("elapsed_s").value(solution.elapsed_s);
  json.key("unused_hosts").open('[');
  for (const yaml::LeftOut& host : report.unused) {
    json.open('{').key("host").value(host.host).key("type").value(host.type).key("why").value(host.why).close(
        '}');
  }
  json.close(']');
  json.key("warnings").open('[');
  for (const std::string& warning : warnings) json.value(warning);
  json.close(']');
  json.key("what_if").open('[');
  for (const WhatIf& one : questions.what_ifs) {
    json.open('{');
    json.key("change").value(one.text);
    json.key("feasible").value(one.feasible);
    if (one.feasible) {
      json.key("status").value(status(one.solution));
      json.key("bottleneck_s").value(one.solution.bottleneck_s);
      json.key("throughput_items_per_s").value(one.items_per_s);
      json.key("latency_s").value(one.solution.latency_s);
      json.key("lower_bound_s").value(one.solution.lower_bound);
      json.key("gap").value(one.solution.gap());
    } else {
      json.key("why").value(one.why);
    }
    json.close('}');
  }
  json.close(']');
  if (questions.losses) write_losses(json, problem, *questions.losses, report.items_per_s());
  json.close('}');
  return json.text();
}

}  // namespace pipeedge::cli
