// The rules that a problem keeps.
#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
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
    fail(what + ": " + std::to_string(actual) + " values for " + std::to_string(expected) + " layers");
  }
}

bool in_range(int index, std::size_t count) { return index >= 0 && static_cast<std::size_t>(index) < count; }

void check_losses(const std::vector<double>& losses, std::size_t count, const std::string& what) {
  if (losses.empty()) return;
  if (losses.size() != count) {
    fail(what + ": " + std::to_string(losses.size()) + " losses, not " + std::to_string(count));
  }
  for (const double loss : losses) {
    if (!(loss >= 0)) fail(what + ": a loss is negative or not a number");
  }
}

void check_model(const Model& model) {
  const std::size_t layers = model.mem_bytes.size();
  if (layers == 0) fail("the model has no layers");
  if (layers > static_cast<std::size_t>(Model::kMostLayers))
    fail("the model has more than " + std::to_string(Model::kMostLayers) + " layers");
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

void check_type(const DeviceType& type, const std::string& what, std::size_t layers) {
  check_number(type.mem_bytes, what + "the memory");
  check_number(type.bw_bytes_per_s, what + "the bandwidth");
  check_number(type.overhead_s, what + "the overhead of a stage");
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
  check_losses(type.loss, layers, what + "the losses");
  if (type.bids() && type.stage_s.size() != (layers + 1) * (layers + 1)) {
    fail(what + "stage_s: " + std::to_string(type.stage_s.size()) + " values for " + std::to_string(layers) +
         " layers");
  }
  for (const double seconds : type.stage_s) {
    if (!(seconds >= 0)) fail(what + "the time of a stage is negative or not a number");
  }
}

void check_setting(const Setting& setting, const Problem& problem) {
  check_number(setting.batch_size, "the batch size");
  if (setting.batch_size <= 0) fail("the batch size must be positive");
  check_number(setting.waiting, "the factor for waiting");
  if (setting.waiting < 1) fail("the factor for waiting is below 1");
  check_number(setting.element_bytes, "the bytes of an element");
  check_number(std::max(setting.input_bytes, 0.0), "the bytes of an item of input");
  check_number(std::max(setting.output_bytes, 0.0), "the bytes of an item of output");
  if (!setting.carried.empty() && setting.carried.size() != problem.model.mem_bytes.size() + 1) {
    fail("carried: " + std::to_string(setting.carried.size()) + " values for " +
         std::to_string(problem.model.mem_bytes.size() + 1) + " cuts");
  }
  for (const double part : setting.carried) {
    if (!(part >= 0 && part <= 1)) fail("carried: a part is not a number from 0 to 1");
  }
  check_number(setting.buffers_in, "the number of input buffers");
  check_number(setting.buffers_out, "the number of output buffers");
  for (std::size_t t = 0; t < setting.types.size(); ++t) {
    check_type(setting.types[t], "device type " + quoted(setting.types[t].name, t) + ": ",
               problem.model.mem_bytes.size());
  }
  for (const DeviceType& type : setting.types) {
    if (problem.returns() && type.bids()) continue;
    if (!type.state_bytes.empty() && type.state_bytes.size() != problem.model.mem_bytes.size()) {
      fail("device type " + type.name + ": state_bytes does not have a value for each layer");
    }
    for (const double bytes : type.state_bytes) check_number(bytes, "device type " + type.name + ": state_bytes");
  }
  if (setting.type_of.size() != problem.hosts.size()) fail("a setting does not have a device type for each host");
  for (std::size_t h = 0; h < problem.hosts.size(); ++h) {
    const int type = setting.type_of[h];
    if (type != Setting::kUnprofiled && !in_range(type, setting.types.size())) {
      fail("host " + quoted(problem.hosts[h], h) + " has device type number " + std::to_string(type) + ", there are " +
           std::to_string(setting.types.size()));
    }
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

void check_idle_watts(const Problem& problem) {
  for (int h = 0; h < problem.host_count(); ++h) {
    const DeviceType* known = nullptr;
    for (const Setting& setting : problem.settings) {
      const DeviceType* type = setting.type(h);
      if (known != nullptr && type != nullptr && known->idle_w != type->idle_w) {
        fail("the settings have different idle_w for the host " + problem.hosts[static_cast<std::size_t>(h)]);
      }
      if (type != nullptr) known = type;
    }
  }
}

void check_aside(const Aside& aside, const Problem& problem) {
  const std::string what = "aside " + aside.name + ": ";
  check_number(aside.repeats, what + "the repeats");
  check_number(aside.fixed_s, what + "fixed_s");
  if (!(aside.max_s > 0)) fail(what + "max_s is not above 0");
  std::set<std::string> dtypes;
  for (const Setting& setting : aside.settings) {
    check_setting(setting, problem);
    if (!dtypes.insert(setting.dtype).second) fail(what + "the number type " + setting.dtype + " comes twice");
  }
  for (const Setting& setting : problem.settings) {
    if (dtypes.count(setting.dtype) == 0) fail(what + "there is no setting for the number type " + setting.dtype);
  }
}

}  // namespace

double Solution::gap() const {
  if (status == Status::kOptimal || status == Status::kInfeasible) return 0;
  if (std::isinf(objective)) return 1;
  return objective > 0 ? std::max(0.0, (objective - lower_bound) / objective) : 0;
}

void validate(const Problem& problem) {
  check_model(problem.model);
  if (problem.settings.empty()) fail("there is no setting: no microbatch size and number type");
  if (problem.widths.empty()) fail("there is no width for links");
  if (!(problem.max_loss >= 0)) fail("the largest loss is negative or not a number");
  if (!(problem.max_latency_s > 0)) fail("the largest latency is not above 0");
  if (!(problem.most_items > 0)) fail("the largest number of items under way is not above 0");
  if (problem.asides.size() + (problem.either.empty() ? 0 : 1) > Problem::kMostAsides)
    fail("there are too many asides");
  for (const Aside& aside : problem.asides) check_aside(aside, problem);
  for (const Aside& aside : problem.either) check_aside(aside, problem);
  for (const Aside& aside : problem.prompts) check_aside(aside, problem);
  for (const Aside& aside : problem.again) check_aside(aside, problem);
  std::set<std::string> names;
  for (const std::string& name : problem.hosts) {
    if (!names.insert(name).second) fail("two hosts have the name " + name);
  }
  std::set<std::pair<double, std::string>> seen;
  std::map<double, double> waiting;
  for (const Setting& setting : problem.settings) {
    check_setting(setting, problem);
    if (waiting.emplace(setting.batch_size, setting.waiting).first->second != setting.waiting) {
      fail("the settings of one microbatch size have different factors for waiting");
    }
    if (!seen.emplace(setting.batch_size, setting.dtype).second) {
      fail("the number type " + setting.dtype + " comes twice for one microbatch size");
    }
  }
  for (std::size_t i = 0; i < problem.links.size(); ++i) {
    check_link(problem.links[i], "link number " + std::to_string(i), problem.hosts.size());
  }
  if (problem.data_host != -1 && !in_range(problem.data_host, problem.hosts.size())) {
    fail("the data host is number " + std::to_string(problem.data_host) + ", there are " +
         std::to_string(problem.hosts.size()) + " hosts");
  }
  check_idle_watts(problem);
  for (const Width& width : problem.widths) {
    if (width.bits < 0 || width.bits > 64) fail("a link carries " + std::to_string(width.bits) + " bits a value");
    check_losses(width.loss, problem.model.mem_bytes.size() + 1, std::to_string(width.bits) + " bits");
  }
}

std::vector<int> hosts_without_watts(const Problem& problem) {
  std::vector<int> unknown;
  for (int h = 0; h < problem.host_count(); ++h) {
    const auto lacks = [&](const Setting& setting) {
      const DeviceType* type = setting.type(h);
      return type != nullptr && type->busy_w < 0;
    };
    if (std::any_of(problem.settings.begin(), problem.settings.end(), lacks)) unknown.push_back(h);
  }
  return unknown;
}

}  // namespace pipeedge
