// The rules that a problem keeps.
#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

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

bool in_range(int index, std::size_t count) {
  return index >= 0 && static_cast<std::size_t>(index) < count;
}

void check_model(const Model& model) {
  const std::size_t layers = model.mem_bytes.size();
  if (layers == 0) fail("the model has no layers");
  check_count(model.elements_out.size(), layers, "the model's elements_out");
  check_numbers(model.mem_bytes, "the model's memory");
  check_numbers(model.elements_out, "the model's elements_out");
  check_number(model.elements_in, "the model's elements_in");
  if (model.shared_with.empty()) return;
  check_count(model.shared_with.size(), layers, "the model's shared_with");
  std::vector<char> named(layers, 0);
  for (std::size_t l = 0; l < layers; ++l) {
    const int twin = model.shared_with[l];
    if (twin == Model::kUnshared) continue;
    if (twin < 0 || twin >= static_cast<int>(l) || std::exchange(named[static_cast<std::size_t>(twin)], 1) != 0) {
      fail("layer " + std::to_string(l + 1) + " shares the weights of layer " + std::to_string(twin + 1) +
           "; name the nearest layer before it that has them");
    }
  }
}

// Checks what the links carry and the stages buffer.
void check_sizes(const Problem& problem, std::size_t layers) {
  check_number(problem.batch_size, "the batch size");
  if (problem.batch_size <= 0) fail("the batch size must be positive");
  check_number(problem.element_bytes, "the bytes of an element");
  check_number(std::max(problem.input_bytes, 0.0), "the bytes of an item of input");
  check_number(std::max(problem.output_bytes, 0.0), "the bytes of an item of output");
  check_number(problem.buffers_in, "the number of input buffers");
  check_number(problem.buffers_out, "the number of output buffers");
  if (problem.cut_bits.empty()) return;
  check_count(problem.cut_bits.size(), layers + 1, "cut_bits, with the input,");
  for (const int bits : problem.cut_bits) {
    if (bits < 0 || bits > 64) fail("a link carries " + std::to_string(bits) + " bits a value");
  }
}

void check_type(const DeviceType& type, const std::string& what, std::size_t layers) {
  check_number(type.mem_bytes, what + "the memory");
  check_number(type.bw_bytes_per_s, what + "the bandwidth");
  check_number(type.feed_s, what + "the time of feeding");
  check_number(type.collect_s, what + "the time of collecting");
  check_number(type.input_send_s, what + "the time of sending the input");
  check_number(type.output_receive_s, what + "the time of receiving the outputs");
  check_number(std::max(type.busy_w, 0.0), what + "the power of a busy host");
  check_number(type.idle_w, what + "the power of an idle host");
  if (type.busy_w >= 0 && type.idle_w > type.busy_w) fail(what + "a busy host takes less power than an idle one");
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

void check_link(const Link& link, const std::string& what, std::size_t hosts) {
  if (!in_range(link.from, hosts) || !in_range(link.to, hosts)) {
    fail(what + " joins host numbers " + std::to_string(link.from) + " and " + std::to_string(link.to) +
         ", there are " + std::to_string(hosts));
  }
  if (link.from == link.to) fail(what + " joins a host to itself");
  check_number(link.bw_bytes_per_s, what + ": the bandwidth");
  check_number(link.latency_s, what + ": the latency");
}

}  // namespace

double relative_gap(Status status, double objective, double lower_bound) {
  if (status == Status::kOptimal || status == Status::kInfeasible) return 0;
  if (std::isinf(objective)) return 1;
  return objective > 0 ? std::max(0.0, (objective - lower_bound) / objective) : 0;
}

void validate(const Problem& problem) {
  const std::size_t layers = problem.model.mem_bytes.size();
  check_model(problem.model);
  check_sizes(problem, layers);
  for (std::size_t t = 0; t < problem.types.size(); ++t) {
    check_type(problem.types[t], "device type " + quoted(problem.types[t].name, t) + ": ", layers);
  }
  for (std::size_t h = 0; h < problem.hosts.size(); ++h) {
    if (!in_range(problem.hosts[h].type, problem.types.size())) {
      fail("host " + quoted(problem.hosts[h].name, h) + " has device type number " +
           std::to_string(problem.hosts[h].type) + ", there are " +
           std::to_string(problem.types.size()));
    }
  }
  for (std::size_t i = 0; i < problem.links.size(); ++i) {
    check_link(problem.links[i], "link number " + std::to_string(i), problem.hosts.size());
  }
  if (problem.data_host != -1 && !in_range(problem.data_host, problem.hosts.size())) {
    fail("the data host is number " + std::to_string(problem.data_host) + ", there are " +
         std::to_string(problem.hosts.size()) + " hosts");
  }
}

}  // namespace pipeedge
