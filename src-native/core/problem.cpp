// Checks and costs of one problem and one schedule: what every other part must agree with.
#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "links.hpp"

namespace pipeedge {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string quoted(const std::string& name, std::size_t index) {
  return name.empty() ? "number " + std::to_string(index) : "'" + name + "'";
}

void check_number(double value, const std::string& what) {
  if (std::isnan(value)) fail(what + " is not a number");
  if (std::isinf(value)) fail(what + " is infinite");
  if (value < 0) fail(what + " is negative");
}

void check_numbers(const std::vector<double>& values, const std::string& what) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    check_number(values[i], what + " of layer " + std::to_string(i + 1));
  }
}

void check_count(std::size_t actual, std::size_t expected, const std::string& what) {
  if (actual != expected) {
    fail(what + ": " + std::to_string(actual) + " values for " + std::to_string(expected) +
         " layers");
  }
}

const DeviceType* data_type(const Problem& problem) {
  if (problem.data_host == -1) return nullptr;
  const Host& host = problem.hosts[static_cast<std::size_t>(problem.data_host)];
  return &problem.types[static_cast<std::size_t>(host.type)];
}

bool in_range(int index, std::size_t count) {
  return index >= 0 && static_cast<std::size_t>(index) < count;
}

}  // namespace

double Solution::gap() const {
  if (status == Status::kOptimal || status == Status::kInfeasible) return 0;
  if (std::isinf(objective)) return 1;
  return objective > 0 ? std::max(0.0, (objective - lower_bound) / objective) : 0;
}

double StageCost::worst_s() const { return std::max({busy_s(), link_in_s, link_out_s}); }

void validate(const Problem& problem) {
  const Model& model = problem.model;
  const std::size_t layers = model.mem_bytes.size();
  if (layers == 0) fail("the model has no layers");
  check_count(model.elements_out.size(), layers, "the model's elements_out");
  check_numbers(model.mem_bytes, "the model's memory");
  check_numbers(model.elements_out, "the model's elements_out");
  check_number(model.elements_in, "the model's elements_in");
  check_number(problem.batch_size, "the batch size");
  if (problem.batch_size <= 0) fail("the batch size must be positive");
  check_number(problem.element_bytes, "the bytes of an element");
  check_number(std::max(problem.input_bytes, 0.0), "the bytes of an item of input");
  check_number(std::max(problem.output_bytes, 0.0), "the bytes of an item of output");
  check_number(problem.buffers_in, "the number of input buffers");
  check_number(problem.buffers_out, "the number of output buffers");
  if (!problem.cut_bits.empty()) {
    check_count(problem.cut_bits.size(), layers + 1, "cut_bits, with the input,");
    for (const int bits : problem.cut_bits) {
      if (bits < 0 || bits > 64) fail("a link carries " + std::to_string(bits) + " bits a value");
    }
  }

  for (std::size_t t = 0; t < problem.types.size(); ++t) {
    const DeviceType& type = problem.types[t];
    const std::string what = "device type " + quoted(type.name, t) + ": ";
    check_number(type.mem_bytes, what + "the memory");
    check_number(type.bw_bytes_per_s, what + "the bandwidth");
    check_number(type.feed_s, what + "the time of feeding");
    check_number(type.collect_s, what + "the time of collecting");
    check_count(type.time_s.size(), layers, what + "time_s");
    check_numbers(type.time_s, what + "the time");
    const auto check_known = [&](const std::vector<double>& values, const std::string& name) {
      if (!values.empty()) check_count(values.size(), layers, what + name);
      check_numbers(values, what + name);
    };
    check_known(type.weight_bytes, "the weights");
    check_known(type.receive_s, "receive_s");
    check_known(type.send_s, "send_s");
    check_known(type.activation_bytes, "the activations");
    if (type.bids() && type.stage_s.size() != (layers + 1) * (layers + 1)) {
      fail(what + "stage_s: " + std::to_string(type.stage_s.size()) + " values for " + std::to_string(layers) +
           " layers");
    }
    for (const double seconds : type.stage_s) {
      if (!(seconds >= 0)) fail(what + "the time of a stage is negative or not a number");
    }
  }
  for (std::size_t h = 0; h < problem.hosts.size(); ++h) {
    if (!in_range(problem.hosts[h].type, problem.types.size())) {
      fail("host " + quoted(problem.hosts[h].name, h) + " has device type number " +
           std::to_string(problem.hosts[h].type) + ", there are " +
           std::to_string(problem.types.size()));
    }
  }
  for (std::size_t i = 0; i < problem.links.size(); ++i) {
    const Link& link = problem.links[i];
    const std::string what = "link number " + std::to_string(i);
    if (!in_range(link.from, problem.hosts.size()) || !in_range(link.to, problem.hosts.size())) {
      fail(what + " joins host numbers " + std::to_string(link.from) + " and " +
           std::to_string(link.to) + ", there are " + std::to_string(problem.hosts.size()));
    }
    if (link.from == link.to) fail(what + " joins a host to itself");
    check_number(link.bw_bytes_per_s, what + ": the bandwidth");
    check_number(link.latency_s, what + ": the latency");
  }
  if (problem.data_host != -1 && !in_range(problem.data_host, problem.hosts.size())) {
    fail("the data host is number " + std::to_string(problem.data_host) + ", there are " +
         std::to_string(problem.hosts.size()) + " hosts");
  }
}

const std::vector<double>& weights_on(const Problem& problem, const DeviceType& type) {
  return type.weight_bytes.empty() ? problem.model.mem_bytes : type.weight_bytes;
}

double data_seconds(const Problem& problem) {
  const DeviceType* type = data_type(problem);
  return type == nullptr ? 0 : type->feed_s + type->collect_s;
}

double data_floor_seconds(const Problem& problem) {
  const DeviceType* type = data_type(problem);
  return type == nullptr ? 0 : std::max(type->feed_s, type->collect_s);
}

double bottleneck_seconds(const Problem& problem, const std::vector<StageCost>& costs) {
  double worst = data_floor_seconds(problem);
  for (const StageCost& cost : costs) worst = std::max(worst, cost.worst_s());
  return worst;
}

double handling_seconds(const Problem& problem, int host, int first, int last) {
  const DeviceType& type =
      problem.types[static_cast<std::size_t>(problem.hosts[static_cast<std::size_t>(host)].type)];
  const bool free_end = problem.data_host == -1 || problem.data_host == host;
  double seconds = 0;
  if (!type.receive_s.empty() && !(first == 0 && free_end)) {
    seconds += type.receive_s[static_cast<std::size_t>(first)];
  }
  if (!type.send_s.empty() && !(last == problem.model.layers() && free_end)) {
    seconds += type.send_s[static_cast<std::size_t>(last - 1)];
  }
  return seconds;
}

double activation_bytes(const DeviceType& type, int first, int last) {
  if (type.activation_bytes.empty()) return 0;
  return *std::max_element(type.activation_bytes.begin() + first, type.activation_bytes.begin() + last);
}

std::vector<StageCost> evaluate(const Problem& problem, const std::vector<Stage>& stages) {
  const int layers = problem.model.layers();
  std::vector<char> taken(problem.hosts.size(), 0);
  int expected = 0;
  for (const Stage& stage : stages) {
    if (!in_range(stage.host, problem.hosts.size())) {
      fail("a stage runs on host number " + std::to_string(stage.host) + ", there are " +
           std::to_string(problem.hosts.size()));
    }
    if (stage.first != expected || stage.last <= stage.first || stage.last > layers) {
      fail("stages must follow one another: layer " + std::to_string(expected + 1) +
           " should come next, not [" + std::to_string(stage.first + 1) + ", " +
           std::to_string(stage.last) + "]");
    }
    if (std::exchange(taken[static_cast<std::size_t>(stage.host)], 1) != 0) {
      fail("host " +
           quoted(problem.hosts[static_cast<std::size_t>(stage.host)].name,
                  static_cast<std::size_t>(stage.host)) +
           " serves more than one stage");
    }
    expected = stage.last;
  }
  if (expected != layers) fail("layer " + std::to_string(expected + 1) + " is in no stage");

  const LinkTable links(problem);
  std::vector<StageCost> costs;
  costs.reserve(stages.size());
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    const DeviceType& type = links.type_of(stage.host);
    StageCost cost;
    for (int l = stage.first; l < stage.last; ++l) {
      cost.compute_s += type.time_s[static_cast<std::size_t>(l)];
      cost.mem_bytes += weights_on(problem, type)[static_cast<std::size_t>(l)];
    }
    cost.compute_s += handling_seconds(problem, stage.host, stage.first, stage.last);
    if (type.bids()) cost.compute_s = type.bid(stage.first, stage.last);
    if (stage.host == problem.data_host) cost.data_s = data_seconds(problem);
    cost.mem_bytes += activation_bytes(type, stage.first, stage.last);
    cost.mem_bytes += buffer_bytes(problem, stage.first, stage.last);
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
