// The rules that a joint problem keeps, and the costs of one plan: what the search must agree with.
#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <utility>

#include "joint.hpp"
#include "joint_instance.hpp"

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_losses(const std::vector<double>& losses, std::size_t count, const std::string& what) {
  if (losses.empty()) return;
  if (losses.size() != count) {
    fail(what + ": " + std::to_string(losses.size()) + " losses, not " + std::to_string(count));
  }
  for (const double loss : losses) {
    if (!(loss >= 0)) fail(what + ": a loss is negative or not a number");
  }
}

void check_same_model(const Problem& one, const Problem& other) {
  if (one.model.elements_in != other.model.elements_in || one.model.elements_out != other.model.elements_out) {
    fail("the settings have different models: their layers or the elements at their cuts differ");
  }
}

void check_idle_watts(const JointProblem& problem) {
  std::map<std::string, double> known;
  for (const Setting& setting : problem.settings) {
    for (const Host& host : setting.problem.hosts) {
      const double idle_w = setting.problem.types[at(host.type)].idle_w;
      if (known.emplace(host.name, idle_w).first->second != idle_w) {
        fail("the settings have different idle_w for the host " + host.name);
      }
    }
  }
}

// Throws std::invalid_argument unless the stages are a plan at one microbatch size.
void check_plan(const JointProblem& problem, const Wiring& wiring, const std::vector<JointStage>& stages) {
  std::set<int> hosts;
  int next = 0;
  for (const JointStage& stage : stages) {
    if (stage.setting < 0 || at(stage.setting) >= problem.settings.size()) fail("a stage has no such setting");
    const double size = problem.settings[at(stage.setting)].problem.batch_size;
    if (size != problem.settings[at(stages.front().setting)].problem.batch_size) {
      fail("the stages have different microbatch sizes");
    }
    if (stage.host < 0 || stage.host >= wiring.hosts() || wiring.in_setting(stage.host, stage.setting) < 0) {
      fail("a stage runs on a host without a profile for it");
    }
    if (!hosts.insert(stage.host).second) fail("a host serves more than one stage");
    if (stage.first != next || stage.last <= stage.first) fail("stages must follow one another");
    next = stage.last;
    const bool ends = stage.last == problem.layers();
    if (!ends && (stage.width < 0 || at(stage.width) >= problem.widths.size())) fail("a link has no such width");
  }
  if (next != problem.layers()) fail("layer " + std::to_string(next + 1) + " is in no stage");
}

// The energy of a plan, if the watts of all hosts that are on are known; the period has to be.
void add_joules(const JointProblem& problem, const Wiring& wiring, const DataHost& data,
                const std::vector<JointStage>& stages, JointCosts& costs) {
  bool known = data.busy_w >= 0;
  // Its links belong to the data host, whether it has a stage or not.
  const double own = data.joules(costs.period_s) + data.link_joules(stages.front().host != wiring.data_host(),
                                                                    stages.back().host != wiring.data_host());
  double sum = own;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const JointStage& stage = stages[s];
    const Problem& setting = problem.settings[at(stage.setting)].problem;
    const DeviceType& type = setting.types[at(setting.hosts[at(wiring.in_setting(stage.host, stage.setting))].type)];
    JointStageCost& cost = costs.stages[s];
    const bool on_data = stage.host == wiring.data_host();
    if (type.busy_w < 0 || (on_data && data.busy_w < 0)) {
      known = false;
      continue;
    }
    const double computing = busy_joules(type, cost.seconds.compute_s);
    cost.joules = computing + (on_data ? own : type.idle_w * costs.period_s);
    sum += on_data ? computing : *cost.joules;
  }
  if (known) costs.joules = sum;
}

}  // namespace

void validate(const JointProblem& problem) {
  if (problem.settings.empty()) fail("there is no setting: no microbatch size and number type");
  if (problem.widths.empty()) fail("there is no width for links");
  if (!(problem.max_loss >= 0)) fail("the largest loss is negative or not a number");
  if (!(problem.max_latency_s > 0)) fail("the largest latency is not above 0");
  const Problem& first = problem.settings.front().problem;
  std::set<std::pair<double, std::string>> seen;
  for (const Setting& setting : problem.settings) {
    const Problem& own = setting.problem;
    validate(own);
    check_same_model(first, own);
    if (!own.cut_bits.empty()) fail("a setting has cut_bits; the plan chooses them");
    if (!seen.emplace(own.batch_size, setting.dtype).second) {
      fail("the number type " + setting.dtype + " comes twice for one microbatch size");
    }
    if (!setting.loss.empty() && setting.loss.size() != own.types.size()) {
      fail("the losses of " + setting.dtype + " are not those of its device types");
    }
    for (const std::vector<double>& losses : setting.loss) {
      check_losses(losses, at(problem.layers()), "the number type " + setting.dtype);
    }
    const auto data = [](const Problem& p) { return p.data_host == -1 ? "" : p.hosts[at(p.data_host)].name; };
    if (data(own) != data(first)) fail("the settings have different data hosts");
  }
  check_idle_watts(problem);
  const std::vector<std::string> names = host_names(problem);
  const std::set<std::string> known(names.begin(), names.end());
  for (const NamedLink& link : problem.links) {
    for (const std::string& host : {link.from, link.to}) {
      if (known.count(host) == 0) fail("a link names the host " + host + ", which no setting has");
    }
    if (link.from == link.to) fail("a link leads from " + link.from + " to itself");
    if (!(link.bw_bytes_per_s >= 0) || !(link.latency_s >= 0)) {
      fail("the link from " + link.from + " to " + link.to + " has a negative speed or latency, or no number");
    }
  }
  for (const Width& width : problem.widths) {
    if (width.bits < 0 || width.bits > 64) fail("a link carries " + std::to_string(width.bits) + " bits a value");
    check_losses(width.loss, at(problem.layers()) + 1, std::to_string(width.bits) + " bits");
  }
}

std::vector<std::string> unknown_watts(const JointProblem& problem) {
  std::vector<std::string> unknown;
  for (const std::string& name : host_names(problem)) {
    const auto lacks = [&](const Setting& setting) {
      const auto& hosts = setting.problem.hosts;
      return std::any_of(hosts.begin(), hosts.end(), [&](const Host& host) {
        return host.name == name && setting.problem.types[at(host.type)].busy_w < 0;
      });
    };
    if (std::any_of(problem.settings.begin(), problem.settings.end(), lacks)) unknown.push_back(name);
  }
  return unknown;
}

JointCosts evaluate(const JointProblem& problem, const std::vector<JointStage>& stages) {
  const Wiring wiring(problem);
  check_plan(problem, wiring, stages);
  const DataHost data = data_host_of(problem, problem.settings[at(stages.front().setting)].problem.batch_size);
  JointCosts costs;
  costs.period_s = std::max(data.work.feeding_s(stages.front().host != wiring.data_host()),
                            data.work.collecting_s(stages.back().host != wiring.data_host()));
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const JointStage& stage = stages[s];
    const Setting& setting = problem.settings[at(stage.setting)];
    const Problem& own = setting.problem;
    const int host = wiring.in_setting(stage.host, stage.setting);
    const int type_index = own.hosts[at(host)].type;
    const DeviceType& type = own.types[at(type_index)];
    GrowingStage layers(own, type, stage.first);
    while (layers.last() < stage.last) layers.add_layer();

    JointStageCost cost;
    cost.loss = stage_loss(setting, type_index, stage.first, stage.last);
    StageCost& seconds = cost.seconds;
    seconds.compute_s = layers.seconds(receive_seconds(own, host, stage.first), send_seconds(own, host, stage.last));
    if (stage.host == wiring.data_host()) {
      seconds.data_s = data.work.total_s(stage.first > 0, stage.last < problem.layers());
    }
    const Problem& before = s == 0 ? own : problem.settings[at(stages[s - 1].setting)].problem;
    seconds.mem_bytes = layers.held_bytes() + own.buffers_in * cut_bytes(before, stage.first) +
                        own.buffers_out * cut_bytes(own, stage.last);
    seconds.mem_available_bytes = type.mem_bytes;
    if (s == 0 && wiring.data_host() != -1) {
      seconds.link_in_s = wiring.seconds(wiring.data_host(), stage.host, cut_bytes(own, 0));
    } else if (s > 0) {
      seconds.link_in_s = costs.stages.back().seconds.link_out_s;
    }
    if (s + 1 < stages.size()) {
      const Width& width = problem.widths[at(stage.width)];
      const double bytes = link_bytes(own, useful(own, width.bits) ? width.bits : 0, stage.last);
      seconds.link_out_s = wiring.seconds(stage.host, stages[s + 1].host, bytes);
      cost.link_loss = width_loss(width, stage.last);
    } else if (wiring.data_host() != -1) {
      seconds.link_out_s = wiring.seconds(stage.host, wiring.data_host(), cut_bytes(own, stage.last));
    }
    costs.period_s = std::max(costs.period_s, seconds.worst_s());
    costs.latency_s += seconds.link_in_s + seconds.compute_s;
    costs.loss += cost.loss + cost.link_loss;
    costs.stages.push_back(cost);
  }
  costs.latency_s += costs.stages.back().seconds.link_out_s;
  add_joules(problem, wiring, data, stages, costs);
  return costs;
}

}  // namespace pipeedge
