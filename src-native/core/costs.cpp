// Costs of one plan: what the search must agree with.
#include "costs.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace pipeedge {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

// Whether nothing crosses a link on the host where the model begins or ends.
bool free_end(const Problem& problem, int host) { return problem.data_host == -1 || problem.data_host == host; }

void check_plan(const Problem& problem, const std::vector<Stage>& stages) {
  const auto number = [](int value) { return std::to_string(value); };
  std::vector<char> taken(problem.hosts.size(), 0);
  int expected = 0;
  for (const Stage& stage : stages) {
    if (stage.host < 0 || stage.host >= problem.host_count()) {
      fail("a stage runs on host number " + number(stage.host) + ", there are " + number(problem.host_count()));
    }
    const std::string& name = problem.hosts[at(stage.host)];
    if (stage.setting < 0 || at(stage.setting) >= problem.settings.size()) fail("a stage has no such setting");
    if (problem.setting(stage.setting).batch_size != problem.setting(stages.front().setting).batch_size) {
      fail("the stages have different microbatch sizes");
    }
    if (problem.setting(stage.setting).type(stage.host) == nullptr) {
      fail("host '" + name + "' has no profile for its stage");
    }
    if (stage.first != expected || stage.last <= stage.first || stage.last > problem.layers()) {
      fail("stages must follow one another: layer " + number(expected + 1) + " should come next, not [" +
           number(stage.first + 1) + ", " + number(stage.last) + "]");
    }
    if (std::exchange(taken[at(stage.host)], 1) != 0) fail("host '" + name + "' serves more than one stage");
    expected = stage.last;
    const bool ends = stage.last == problem.layers();
    if (!ends && (stage.width < 0 || at(stage.width) >= problem.widths.size())) fail("a link has no such width");
  }
  if (expected != problem.layers()) fail("layer " + number(expected + 1) + " is in no stage");
}

// The energy of a plan, if the watts of all hosts that are on are known; the period has to be.
void add_joules(const Problem& problem, const DataHost& data, const std::vector<Stage>& stages, Costs& costs) {
  bool known = data.busy_w >= 0;
  // Its links belong to the data host, whether it has a stage or not.
  const double own = data.joules(costs.period_s) + data.link_joules(stages.front().host != problem.data_host,
                                                                    stages.back().host != problem.data_host);
  double sum = own;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const DeviceType& type = *problem.setting(stages[s].setting).type(stages[s].host);
    StageCost& cost = costs.stages[s];
    const bool on_data = stages[s].host == problem.data_host;
    if (type.busy_w < 0 || (on_data && data.busy_w < 0)) {
      known = false;
      continue;
    }
    const double computing = busy_joules(type, cost.compute_s);
    cost.joules = computing + (on_data ? own : type.idle_w * costs.period_s);
    sum += on_data ? computing : *cost.joules;
  }
  if (known) costs.joules = sum;
}

}  // namespace

bool Costs::fits() const {
  return std::all_of(stages.begin(), stages.end(), [](const StageCost& cost) {
    return cost.mem_bytes + cost.beside_bytes <= loosened(cost.mem_available_bytes);
  });
}

const std::vector<double>& weights_on(const Problem& problem, const DeviceType& type) {
  return type.weight_bytes.empty() ? problem.model.mem_bytes : type.weight_bytes;
}

double layer_bytes(const Problem& problem, const Setting& setting, const DeviceType& type, int layer) {
  GrowingStage stage(problem, type, layer);
  stage.add_layer();
  return stage_bytes(problem, setting, stage);
}

double stage_bytes(const Problem& problem, const Setting& setting, const GrowingStage& stage) {
  return stage.held_bytes() + setting.buffers_in * cut_bytes(problem, setting, stage.first()) +
         setting.buffers_out * cut_bytes(problem, setting, stage.last());
}

double stage_loss(const DeviceType& type, int first, int last) {
  double sum = 0;
  for (int l = first; l < last && !type.loss.empty(); ++l) sum += type.loss[at(l)];
  return sum;
}

double receive_seconds(const Problem& problem, const DeviceType& type, int host, int cut) {
  if (type.receive_s.empty() || cut == problem.layers() || (cut == 0 && free_end(problem, host))) {
    return type.overhead_s;
  }
  return type.overhead_s + type.receive_s[at(cut)];
}

double send_seconds(const Problem& problem, const DeviceType& type, int host, int cut) {
  if (type.send_s.empty() || cut == 0 || (cut == problem.layers() && free_end(problem, host))) return 0;
  return type.send_s[at(cut - 1)];
}

namespace {

void raise_to(DataHost& data, const DeviceType* type) {
  if (type == nullptr) return;
  const auto raise = [](double& most, double value) { most = std::max(most, value); };
  raise(data.feed_s, type->feed_s);
  raise(data.collect_s, type->collect_s);
  raise(data.both_s, type->feed_s + type->collect_s);
  raise(data.input_send_s, type->input_send_s);
  raise(data.output_receive_s, type->output_receive_s);
  data.busy_w = data.busy_w < 0 || type->busy_w < 0 ? -1 : std::max(data.busy_w, type->busy_w);
  data.idle_w = type->idle_w;
}

}  // namespace

DataHost data_host_of(const Problem& problem, double batch_size) {
  DataHost data;
  for (const Setting& setting : problem.settings) {
    if (setting.batch_size == batch_size && problem.data_host != -1) raise_to(data, setting.type(problem.data_host));
  }
  return data;
}

DataHost data_host_of(const Problem& problem, const Aside& aside) {
  DataHost data;
  for (const Setting& setting : aside.settings) {
    if (problem.data_host != -1) raise_to(data, setting.type(problem.data_host));
  }
  return data;
}

bool keeps_asides(const Problem& problem, const Costs& costs) {
  const auto keeps = [](const Aside& aside, const AsideCost& cost) {
    return cost.total_s <= loosened(aside.max_s) && cost.latency_s <= loosened(aside.latency_limit_s) &&
           cost.longest_s <= loosened(aside.longest_limit_s);
  };
  bool any = problem.either.empty();
  for (std::size_t a = 0; a < problem.either.size(); ++a) any = any || keeps(problem.either[a], costs.either[a]);
  for (std::size_t a = 0; a < problem.asides.size(); ++a) any = any && keeps(problem.asides[a], costs.asides[a]);
  return any;
}

AsideCost aside_cost(const Problem& problem, const LinkTable& links, const std::vector<Stage>& stages,
                     const Aside& aside, int first, int last) {
  const DataHost data = data_host_of(problem, aside);
  AsideCost cost;
  const auto takes = [&](double seconds) {
    cost.latency_s += seconds;
    cost.longest_s = std::max(cost.longest_s, seconds);
  };
  takes(data.feeding_s(stages.front().host != problem.data_host));
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    const Setting& setting = *aside.setting(problem.setting(stage.setting).dtype);
    if (s == 0 && problem.data_host != -1) {
      takes(links.seconds(problem.data_host, stage.host, mean_bytes(problem, setting, 0)));
    }
    const DeviceType* const type = setting.type(stage.host);
    if (type == nullptr) return {kInfinity, kInfinity, kInfinity};
    GrowingStage computing(problem, *type, std::max(stage.first, first));
    while (computing.last() < std::min(stage.last, last)) computing.add_layer();
    const double compute_s = computing.seconds(receive_seconds(problem, *type, stage.host, stage.first),
                                               send_seconds(problem, *type, stage.host, stage.last));
    takes(compute_s);
    if (stage.host == problem.data_host) {
      cost.longest_s =
          std::max(cost.longest_s, compute_s + data.total_s(stage.first > 0, stage.last < problem.layers()));
    }
    const bool is_last = s + 1 == stages.size();
    const int bits = is_last ? 0 : problem.widths[at(stage.width)].bits;
    const double bytes = is_last ? mean_bytes(problem, setting, stage.last)
                                 : link_bytes(problem, setting, useful(setting, bits) ? bits : 0, stage.last);
    if (const int to = is_last ? problem.data_host : stages[s + 1].host; to != -1) {
      takes(links.seconds(stage.host, to, bytes));
    }
  }
  takes(data.collecting_s(stages.back().host != problem.data_host));
  cost.total_s = cost.latency_s + aside.repeats * cost.longest_s + aside.fixed_s;
  return cost;
}

Costs evaluate(const Problem& problem, const std::vector<Stage>& stages) {
  return evaluate(problem, LinkTable(problem), stages);
}

Costs evaluate(const Problem& problem, const LinkTable& links, const std::vector<Stage>& stages) {
  check_plan(problem, stages);
  const Setting& whole = problem.setting(stages.front().setting);
  const DataHost data = data_host_of(problem, whole.batch_size);
  Costs costs;
  costs.stages.reserve(stages.size());
  costs.feeding_s = data.feeding_s(stages.front().host != problem.data_host);
  costs.collecting_s = data.collecting_s(stages.back().host != problem.data_host);
  costs.period_s = std::max(costs.feeding_s, costs.collecting_s);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    const Setting& setting = problem.setting(stage.setting);
    const DeviceType& type = *setting.type(stage.host);
    GrowingStage layers(problem, type, stage.first);
    while (layers.last() < stage.last) layers.add_layer();

    StageCost cost;
    cost.loss = stage_loss(type, stage.first, stage.last);
    const double before_s = receive_seconds(problem, type, stage.host, stage.first);
    cost.receive_s = before_s - type.overhead_s;
    cost.send_s = send_seconds(problem, type, stage.host, stage.last);
    cost.compute_s = layers.seconds(before_s, cost.send_s);
    if (stage.host == problem.data_host) cost.data_s = data.total_s(stage.first > 0, stage.last < problem.layers());
    const Setting& before = s == 0 ? setting : problem.setting(stages[s - 1].setting);
    cost.state_bytes = layers.state_bytes();
    cost.activation_bytes = layers.activation_bytes();
    cost.buffer_bytes = setting.buffers_in * cut_bytes(problem, before, stage.first) +
                        setting.buffers_out * cut_bytes(problem, setting, stage.last);
    cost.mem_bytes = layers.held_bytes() + cost.buffer_bytes;
    cost.mem_available_bytes = type.mem_bytes;
    cost.output_bytes = cost.sent_bytes = mean_bytes(problem, setting, stage.last);
    if (s > 0) {
      cost.link_in_s = costs.stages.back().link_out_s;
      cost.link_in_latency_s = costs.stages.back().link_out_latency_s;
    } else if (problem.data_host != -1) {
      cost.link_in_s = links.seconds(problem.data_host, stage.host, mean_bytes(problem, setting, 0));
      cost.link_in_latency_s = links.seconds(problem.data_host, stage.host, 0);
    }
    const bool is_last = s + 1 == stages.size();
    if (!is_last) {
      const Width& width = problem.widths[at(stage.width)];
      const int bits = useful(setting, width.bits) ? width.bits : 0;
      cost.sent_bytes = link_bytes(problem, setting, bits, stage.last);
      cost.link_loss = width.loss_at(stage.last);
    }
    if (const int to = is_last ? problem.data_host : stages[s + 1].host; to != -1) {
      cost.link_out_s = links.seconds(stage.host, to, cost.sent_bytes);
      cost.link_out_latency_s = links.seconds(stage.host, to, 0);
    }
    costs.period_s = std::max(costs.period_s, cost.worst_s());
    costs.latency_s += cost.link_in_s + cost.compute_s;
    costs.loss += cost.loss + cost.link_loss;
    costs.stages.push_back(cost);
  }
  costs.latency_s += costs.stages.back().link_out_s;
  costs.period_s *= whole.waiting;
  if (problem.returns()) {
    costs.latency_s += costs.feeding_s + costs.collecting_s;
    costs.period_s = std::max(costs.period_s, costs.latency_s * whole.batch_size / problem.most_items);
  }
  for (const Aside& one : problem.asides)
    costs.asides.push_back(aside_cost(problem, links, stages, one, 0, problem.layers()));
  for (const Aside& one : problem.either)
    costs.either.push_back(aside_cost(problem, links, stages, one, 0, problem.layers()));
  add_joules(problem, data, stages, costs);
  return costs;
}

}  // namespace pipeedge
