// Costs of one problem and one schedule: what every other part must agree with.
#include "costs.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "links.hpp"

namespace pipeedge {
namespace {

const DeviceType& type_of(const Problem& problem, int host) {
  return problem.types[static_cast<std::size_t>(problem.hosts[static_cast<std::size_t>(host)].type)];
}

// Whether nothing crosses a link on the host where the model begins or ends.
bool free_end(const Problem& problem, int host) {
  return problem.data_host == -1 || problem.data_host == host;
}

// Throws std::invalid_argument unless the stages cover the layers in order, each on a host of its own.
void check_schedule(const Problem& problem, const std::vector<Stage>& stages) {
  const int layers = problem.model.layers();
  const auto number = [](int value) { return std::to_string(value); };
  std::vector<char> taken(problem.hosts.size(), 0);
  int expected = 0;
  for (const Stage& stage : stages) {
    const auto host = static_cast<std::size_t>(stage.host);
    if (stage.host < 0 || host >= problem.hosts.size()) {
      throw std::invalid_argument("a stage runs on host number " + number(stage.host) + ", there are " +
                                  std::to_string(problem.hosts.size()));
    }
    if (stage.first != expected || stage.last <= stage.first || stage.last > layers) {
      throw std::invalid_argument("stages must follow one another: layer " + number(expected + 1) +
                                  " should come next, not [" + number(stage.first + 1) + ", " +
                                  number(stage.last) + "]");
    }
    if (std::exchange(taken[host], 1) != 0) {
      const std::string& name = problem.hosts[host].name;
      throw std::invalid_argument("host " + (name.empty() ? "number " + number(stage.host) : "'" + name + "'") +
                                  " serves more than one stage");
    }
    expected = stage.last;
  }
  if (expected != layers) throw std::invalid_argument("layer " + number(expected + 1) + " is in no stage");
}

}  // namespace

double StageCost::worst_s() const { return std::max({busy_s(), link_in_s, link_out_s}); }

const std::vector<double>& weights_on(const Problem& problem, const DeviceType& type) {
  return type.weight_bytes.empty() ? problem.model.mem_bytes : type.weight_bytes;
}

DataWork data_work(const Problem& problem) {
  if (problem.data_host == -1) return {};
  const DeviceType& type = type_of(problem, problem.data_host);
  return {type.feed_s, type.collect_s, type.feed_s + type.collect_s, type.input_send_s, type.output_receive_s};
}

double bottleneck_seconds(const Problem& problem, const std::vector<Stage>& stages,
                          const std::vector<StageCost>& costs) {
  const DataWork data = data_work(problem);
  double worst = std::max(data.feeding_s(stages.front().host != problem.data_host),
                          data.collecting_s(stages.back().host != problem.data_host));
  for (const StageCost& cost : costs) worst = std::max(worst, cost.worst_s());
  return worst;
}

double receive_seconds(const Problem& problem, int host, int cut) {
  const std::vector<double>& seconds = type_of(problem, host).receive_s;
  if (seconds.empty() || cut == problem.model.layers() || (cut == 0 && free_end(problem, host))) return 0;
  return seconds[static_cast<std::size_t>(cut)];
}

double send_seconds(const Problem& problem, int host, int cut) {
  const std::vector<double>& seconds = type_of(problem, host).send_s;
  if (seconds.empty() || cut == 0 || (cut == problem.model.layers() && free_end(problem, host))) return 0;
  return seconds[static_cast<std::size_t>(cut - 1)];
}

double activation_bytes(const DeviceType& type, int first, int last) {
  if (type.activation_bytes.empty()) return 0;
  return *std::max_element(type.activation_bytes.begin() + first, type.activation_bytes.begin() + last);
}

double latency_seconds(const std::vector<StageCost>& costs) {
  double seconds = 0;
  for (const StageCost& cost : costs) seconds += cost.link_in_s + cost.compute_s;
  return costs.empty() ? 0 : seconds + costs.back().link_out_s;
}

std::vector<StageCost> evaluate(const Problem& problem, const std::vector<Stage>& stages) {
  check_schedule(problem, stages);
  const LinkTable links(problem);
  const DataWork data = data_work(problem);
  std::vector<StageCost> costs;
  costs.reserve(stages.size());
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    const DeviceType& type = links.type_of(stage.host);
    GrowingStage layers(problem, type, stage.first);
    while (layers.last() < stage.last) layers.add_layer();
    StageCost cost;
    cost.compute_s = layers.seconds(receive_seconds(problem, stage.host, stage.first),
                                    send_seconds(problem, stage.host, stage.last));
    if (stage.host == problem.data_host) {
      cost.data_s = data.total_s(stage.first > 0, stage.last < problem.model.layers());
    }
    cost.mem_bytes = layers.held_bytes() + buffer_bytes(problem, stage.first, stage.last);
    cost.mem_available_bytes = type.mem_bytes;
    const int before = s > 0 ? stages[s - 1].host : problem.data_host;
    const int after = s + 1 < stages.size() ? stages[s + 1].host : problem.data_host;
    if (before != -1) cost.link_in_s = links.seconds(before, stage.host, link_bytes(problem, stage.first));
    if (after != -1) cost.link_out_s = links.seconds(stage.host, after, link_bytes(problem, stage.last));
    costs.push_back(cost);
  }
  return costs;
}

}  // namespace pipeedge
