// Tests of the core alone, for builds that Python tests do not cover: -DNDEBUG, AddressSanitizer, UBSan.
// Checks use a macro, because assert() does nothing with NDEBUG.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/conditions.hpp"
#include "../core/costs.hpp"
#include "../core/link_bits.hpp"
#include "../core/problem.hpp"

namespace {

using pipeedge::Costs;
using pipeedge::kInfinity;
using pipeedge::Objective;
using pipeedge::Options;
using pipeedge::Problem;
using pipeedge::Setting;
using pipeedge::Solution;
using pipeedge::Stage;
using pipeedge::Status;

int failures = 0;

#define CHECK(condition) CHECK_WITH(condition, "")
#define CHECK_WITH(condition, ...) check(condition, __LINE__, #condition, __VA_ARGS__)

template <typename... Values>
void check(bool holds, int line, const char* condition, const Values&... values) {
  if (holds) return;
  ++failures;
  std::cerr << __FILE__ << ":" << line << ": " << condition;
  ((std::cerr << " " << values), ...);
  std::cerr << "\n";
}

bool close(double a, double b) {
  return a == b || std::abs(a - b) <= 1e-8 * std::max(std::abs(a), std::abs(b)) + 1e-12;
}

std::size_t at(int i) { return static_cast<std::size_t>(i); }

// The only setting of a problem.
Setting& only(Problem& problem) { return problem.settings.front(); }

void add_host(Problem& problem, const std::string& name, int type) {
  problem.hosts.push_back(name);
  only(problem).type_of.push_back(type);
}

// `hosts` host counts by type; layer l takes (1 + l % 3) / speed seconds.
Problem plain(int layers, const std::vector<std::pair<double, int>>& speeds_and_hosts) {
  Problem problem;
  problem.model.mem_bytes.assign(at(layers), 10);
  problem.model.elements_out.assign(at(layers), 1);
  problem.model.elements_in = 1;
  problem.settings.resize(1);
  Setting& setting = only(problem);
  setting.batch_size = 1;
  setting.element_bytes = 1;
  for (const auto& [speed, hosts] : speeds_and_hosts) {
    pipeedge::DeviceType type;
    type.name = "type" + std::to_string(setting.types.size());
    type.mem_bytes = 1e6;
    type.bw_bytes_per_s = 1e3;
    for (int l = 0; l < layers; ++l) type.time_s.push_back((1 + l % 3) / speed);
    for (int h = 0; h < hosts; ++h) {
      add_host(problem, type.name + "-" + std::to_string(h), static_cast<int>(setting.types.size()));
    }
    setting.types.push_back(type);
  }
  return problem;
}

Solution solve(const Problem& problem, Objective objective = Objective::kThroughput, double limit = kInfinity) {
  Options options;
  options.objective = objective;
  options.time_limit_s = limit;
  return pipeedge::solve(problem, options);
}

// Enumerates every schedule by recursion over hosts; evaluate() gives the costs.
struct BruteForce {
  const Problem& problem;
  std::vector<Stage> stages;
  std::vector<char> taken;
  double period = kInfinity;
  double latency = kInfinity;

  explicit BruteForce(const Problem& p) : problem(p), taken(p.hosts.size(), 0) { extend(0); }

  void extend(int cut) {
    if (cut == problem.layers()) {
      const Costs costs = pipeedge::evaluate(problem, stages);
      if (!costs.fits() || std::isinf(costs.period_s) || std::isinf(costs.loss)) return;
      period = std::min(period, costs.period_s);
      latency = std::min(latency, costs.latency_s);
      return;
    }
    for (int host = 0; host < static_cast<int>(taken.size()); ++host) {
      if (taken[at(host)] != 0) continue;
      taken[at(host)] = 1;
      for (int last = cut + 1; last <= problem.layers(); ++last) {
        for (int width = 0; width < static_cast<int>(problem.widths.size()); ++width) {
          stages.push_back({host, cut, last, 0, width});
          extend(last);
          stages.pop_back();
          if (last == problem.layers()) break;
        }
      }
      taken[at(host)] = 0;
    }
  }
};

Problem random_problem(std::mt19937_64& random, int layers, int hosts, bool links) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const auto real = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  Problem problem;
  problem.settings.resize(1);
  Setting& setting = only(problem);
  setting.batch_size = 2;
  problem.model.elements_in = pick(0, 4);
  double mem = 0;
  for (int l = 0; l < layers; ++l) {
    problem.model.mem_bytes.push_back(pick(0, 40));
    problem.model.elements_out.push_back(pick(0, 4));
    mem += problem.model.mem_bytes.back();
  }
  if (pick(0, 2) == 0) {
    std::vector<int> last_of_group(3, pipeedge::Model::kUnshared);  // nearest layer of each
    for (int l = 0; l < layers; ++l) {
      problem.model.shared_with.push_back(std::exchange(last_of_group[at(pick(0, 2))], l));
    }
  }
  const int types = pick(1, std::max(1, hosts));
  for (int t = 0; t < types; ++t) {
    pipeedge::DeviceType type;
    type.mem_bytes = real(0.2, 2) * (mem + 50);
    type.bw_bytes_per_s = pick(0, 9) == 0 ? 0 : real(4, 60);
    for (int l = 0; l < layers; ++l) type.time_s.push_back(real(0.2, 3));
    for (auto* beside : {&type.receive_s, &type.send_s, &type.activation_bytes}) {
      if (pick(0, 1) == 0) continue;
      const double most = beside == &type.activation_bytes ? 30 : 1;
      for (int l = 0; l < layers; ++l) beside->push_back(real(0, most));
    }
    setting.types.push_back(type);
  }
  for (int h = 0; h < hosts; ++h) add_host(problem, "h" + std::to_string(h), pick(0, types - 1));
  if (pick(0, 2) == 0) problem.data_host = pick(0, hosts - 1);
  for (int a = 0; links && a < hosts; ++a) {
    for (int b = 0; b < hosts; ++b) {
      if (a != b && pick(0, 1) == 0) problem.links.push_back({a, b, real(0, 40), pick(0, 1) * 0.5});
    }
  }
  // Bits that differ from cut to cut, so that more elements need not be more bytes.
  if (pick(0, 1) == 0) {
    problem.widths.clear();
    for (const int bits : {0, 3, 11}) {
      problem.widths.push_back({bits, std::vector<double>(at(layers) + 1, kInfinity)});
    }
    for (int cut = 0; cut <= layers; ++cut) problem.widths[at(pick(0, 2))].loss[at(cut)] = 0;
  }
  if (problem.data_host != -1 && pick(0, 1) == 0) {
    for (pipeedge::DeviceType& type : setting.types) {
      for (double* data :
           {&type.overhead_s, &type.feed_s, &type.collect_s, &type.input_send_s, &type.output_receive_s}) {
        if (pick(0, 1) == 0) *data = real(0, 3);
      }
    }
  }
  return problem;
}

double objective_of(const Problem& problem, const Solution& solution, Objective objective) {
  const Costs costs = pipeedge::evaluate(problem, solution.stages);
  CHECK(costs.fits());
  return objective == Objective::kThroughput ? costs.period_s / solution.batch_size : costs.latency_s;
}

void test_known_answers() {
  // Layers of 1, 2, 3 seconds, twice: two equal hosts get half each.
  const Solution even = solve(plain(6, {{1, 2}}));
  CHECK(even.status == Status::kOptimal);
  CHECK_WITH(even.period_s == 6 && even.latency_s > 12, even.period_s, even.latency_s);
  CHECK(even.stages.size() == 2 && even.stages[0].host == 0 && even.stages[0].last == 3);
  // One fast host is as good as many: the fewest hosts win.
  Problem links_decide = plain(6, {{100, 3}});
  for (double& elements : links_decide.model.elements_out) elements = 1e4;
  const Solution alone = solve(links_decide);
  CHECK(alone.stages.size() == 1 && alone.gap() == 0);
  // A link without bandwidth carries nothing, unless there is nothing to carry.
  Problem cut_off = plain(2, {{1, 2}});
  only(cut_off).types[0].bw_bytes_per_s = 0;
  CHECK(solve(cut_off).stages.size() == 1);
  cut_off.model.elements_out[0] = 0;
  CHECK(solve(cut_off).period_s == 2);
}

// Layers 3 and 4 have the weights of 1 and 2, and layer 4 has 5 bytes besides.
void test_shared_weights() {
  Problem problem = plain(4, {{1, 1}});
  problem.model.mem_bytes = {30, 20, 10, 25};
  problem.model.shared_with = {-1, -1, 0, 1};
  const auto held = [&](int first, int last) {
    Problem part = problem;
    std::vector<Stage> stages;
    for (const auto& [from, to] : {std::pair{0, first}, {first, last}, {last, 4}}) {
      if (from == to) continue;
      stages.push_back({static_cast<int>(stages.size()), from, to});
    }
    while (part.hosts.size() < stages.size()) add_host(part, "more-" + std::to_string(part.hosts.size()), 0);
    const double buffers = only(part).buffers_in + only(part).buffers_out;  // every cut has one byte
    return pipeedge::evaluate(part, stages).stages[first == 0 ? 0 : 1].mem_bytes - buffers;
  };
  CHECK_WITH(held(0, 4) == 30 + 20 + 5, held(0, 4));
  CHECK_WITH(held(1, 4) == 20 + 10 + 5, held(1, 4));
  CHECK_WITH(held(2, 4) == 10 + 25, held(2, 4));
  CHECK_WITH(held(0, 3) == 30 + 20, held(0, 3));
  only(problem).types[0].mem_bytes = 60;
  CHECK(solve(problem).stages.size() == 1);
  problem.model.shared_with.clear();
  CHECK(solve(problem).status == Status::kInfeasible);
}

void test_infeasible() {
  Problem problem = plain(4, {{1, 2}, {2, 0}});
  only(problem).types[0].mem_bytes = 9;
  const Solution none = solve(problem);
  CHECK(none.status == Status::kInfeasible && none.stages.empty() && std::isinf(none.lower_bound));
  problem.hosts.clear();
  only(problem).type_of.clear();
  CHECK(solve(problem).status == Status::kInfeasible);
}

void test_brute_force() {
  std::mt19937_64 random(1);
  int feasible = 0;
  for (int n = 0; n < 400; ++n) {
    const int layers = 2 + n % 4;
    const Problem problem = random_problem(random, layers, 1 + n % 4, n % 3 == 0);
    const BruteForce best(problem);
    for (const Objective objective : {Objective::kThroughput, Objective::kLatency}) {
      const Solution solution = solve(problem, objective);
      const double expected =
          objective == Objective::kThroughput ? best.period / problem.settings[0].batch_size : best.latency;
      if (std::isinf(expected)) {
        CHECK_WITH(solution.status == Status::kInfeasible, n);
        continue;
      }
      ++feasible;
      CHECK_WITH(solution.status == Status::kOptimal, n);
      CHECK_WITH(close(solution.objective, expected), n, solution.objective, expected);
      CHECK_WITH(close(objective_of(problem, solution, objective), expected), n);
    }
  }
  CHECK_WITH(feasible > 300, feasible);
}

// No link exceeds the period of the narrowest links, and none could be wider.
void test_automatic_bits() {
  std::mt19937_64 random(3);
  int compressed = 0;
  for (int n = 0; n < 500; ++n) {
    const Problem problem = pipeedge::with_all_link_bits(random_problem(random, 2 + n % 4, 1 + n % 4, n % 3 == 0));
    CHECK(problem.widths.front().bits == 0 && problem.widths.back().bits == 2);
    const BruteForce least(pipeedge::with_link_bits(problem, 2));
    Options options;
    options.time_limit_s = kInfinity;
    const Solution found = pipeedge::solve_with_auto_bits(problem, options);
    if (std::isinf(least.period)) {
      CHECK_WITH(found.status == Status::kInfeasible, n);
      continue;
    }
    CHECK_WITH(close(found.period_s, least.period), n, found.period_s, least.period);
    CHECK_WITH(close(pipeedge::evaluate(problem, found.stages).period_s, least.period), n);
    for (std::size_t s = 0; s + 1 < found.stages.size(); ++s) {
      if (found.stages[s].width == 0) continue;
      ++compressed;
      std::vector<Stage> wider = found.stages;
      --wider[s].width;
      CHECK_WITH(pipeedge::evaluate(problem, wider).stages[s].link_out_s > least.period, n);
    }
  }
  CHECK_WITH(compressed > 10, compressed);
}

// Many classes (counts that fill several words), links, both objectives, and little time.
void test_large_and_stopped() {
  std::mt19937_64 random(2);
  for (int n = 0; n < 12; ++n) {
    const Problem problem = random_problem(random, 24, n % 2 == 0 ? 60 : 14, n % 3 == 2);
    for (const Objective objective : {Objective::kThroughput, Objective::kLatency}) {
      for (const double limit : {0.0, 0.001, 0.2}) {
        // Processor time, as others may use the machine meanwhile.
        const std::clock_t start = std::clock();
        const Solution solution = solve(problem, objective, limit);
        const double used_s = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
        CHECK_WITH(used_s < limit + 2, used_s);
        if (solution.stages.empty()) continue;
        CHECK_WITH(close(objective_of(problem, solution, objective), solution.objective), n);
        CHECK_WITH(solution.lower_bound <= solution.objective, n);
        CHECK_WITH(solution.gap() >= 0 && solution.gap() <= 1, n);
      }
    }
  }
}

template <typename Change>
void rejects(const std::string& words, Change change) {
  Problem problem = plain(3, {{1, 2}});
  pipeedge::validate(problem);
  change(problem);
  try {
    solve(problem);
    CHECK_WITH(false, "accepted:", words);
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    CHECK_WITH(message.find(words) != std::string::npos, message);
    CHECK_WITH(message.find('\n') == std::string::npos, message);
  }
}

void test_validate() {
  const double nan = std::nan("");
  rejects("no layers", [](Problem& p) { p.model.mem_bytes.clear(); });
  rejects("2 values for 3 layers", [](Problem& p) { p.model.elements_out.pop_back(); });
  rejects("layer 2 is negative", [](Problem& p) { p.model.mem_bytes[1] = -1; });
  rejects("layer 3 is not a number", [&](Problem& p) { p.model.elements_out[2] = nan; });
  rejects("'type0': the memory is infinite", [](Problem& p) { only(p).types[0].mem_bytes = kInfinity; });
  rejects("'type0': time_s: 4 values", [](Problem& p) { only(p).types[0].time_s.push_back(1); });
  rejects("bandwidth is negative", [](Problem& p) { only(p).types[0].bw_bytes_per_s = -1; });
  rejects("'type0-1' has device type number 7", [](Problem& p) { only(p).type_of[1] = 7; });
  rejects("2 values for 3 layers", [](Problem& p) { p.model.shared_with = {-1, -1}; });
  rejects("layer 2 shares the weights of layer 3", [](Problem& p) { p.model.shared_with = {-1, 2, -1}; });
  rejects("layer 3 shares the weights of layer 1", [](Problem& p) { p.model.shared_with = {-1, 0, 0}; });
  rejects("data host is number 2", [](Problem& p) { p.data_host = 2; });
  rejects("batch size", [](Problem& p) { only(p).batch_size = 0; });
  rejects("buffers", [](Problem& p) { only(p).buffers_out = -1; });
  rejects("to itself", [](Problem& p) { p.links.push_back({1, 1, 1, 0}); });
  rejects("host numbers 0 and 9", [](Problem& p) { p.links.push_back({0, 9, 1, 0}); });
  rejects("two hosts have the name type0-0", [](Problem& p) { p.hosts[1] = p.hosts[0]; });
  rejects("there is no width", [](Problem& p) { p.widths.clear(); });
  rejects("8 bits: 2 losses, not 4", [](Problem& p) { p.widths.push_back({8, {0, 0}}); });
  rejects("comes twice for one microbatch size", [](Problem& p) { p.settings.push_back(only(p)); });
  rejects("latency is negative", [](Problem& p) { p.links.push_back({0, 1, 1, -1}); });
}

void test_evaluate_rejects_what_is_no_schedule() {
  const Problem problem = plain(3, {{1, 2}});
  const std::vector<std::pair<std::string, std::vector<Stage>>> wrong = {
      {"is in no stage", {{0, 0, 2}}},
      {"should come next", {{0, 0, 1}, {1, 2, 3}}},
      {"should come next", {{0, 0, 2}, {1, 1, 3}}},
      {"should come next", {{0, 0, 4}}},
      {"more than one stage", {{0, 0, 1}, {0, 1, 3}}},
      {"host number 2", {{2, 0, 3}}},
  };
  for (const auto& [words, stages] : wrong) {
    try {
      pipeedge::evaluate(problem, stages);
      CHECK_WITH(false, "accepted:", words);
    } catch (const std::invalid_argument& error) {
      CHECK_WITH(std::string(error.what()).find(words) != std::string::npos, error.what());
    }
  }
}

// Values near the limits of double must give a result, not an endless bisection.
void test_extreme_numbers() {
  for (const double scale : {0.0, 1e-300, 1e-12, 1e12, 1e300}) {
    Problem problem = plain(5, {{1, 2}, {2, 1}});
    for (auto& type : only(problem).types) {
      for (double& time : type.time_s) time *= scale;
    }
    for (const Objective objective : {Objective::kThroughput, Objective::kLatency}) {
      const Solution solution = solve(problem, objective, 5);
      CHECK_WITH(solution.status == Status::kOptimal, scale, solution.elapsed_s);
    }
    problem.model.elements_out.assign(5, 1e300);
    only(problem).buffers_in = only(problem).buffers_out = 1e300;
    CHECK_WITH(solve(problem, Objective::kThroughput, 5).status == Status::kInfeasible, scale);
  }
}

// Conditions scale what they name and nothing else.
void test_conditions() {
  Problem problem = plain(4, {{1, 2}});
  problem.data_host = 0;
  const std::vector<Stage> stages{{0, 0, 2}, {1, 2, 4}};
  const Costs before = pipeedge::evaluate(problem, stages);
  pipeedge::Conditions conditions;
  conditions.hosts.push_back({1, 3, 100});
  conditions.links.push_back({0, 1, 5});
  conditions.data_work = pipeedge::DataWork{0.25, 0.5, 0, 0};
  const Problem changed = pipeedge::with_conditions(problem, conditions);
  const Costs after = pipeedge::evaluate(changed, stages);
  CHECK(after.stages[0].compute_s == before.stages[0].compute_s && after.stages[0].data_s == 0.75);
  CHECK(after.stages[1].compute_s == 3 * before.stages[1].compute_s);
  CHECK(close(after.stages[0].link_out_s, 5 * before.stages[0].link_out_s));
  CHECK(close(after.stages[1].link_out_s, before.stages[1].link_out_s));
  CHECK(after.stages[1].mem_available_bytes == before.stages[1].mem_available_bytes - 100);
  CHECK(after.feeding_s == 0.25 && after.collecting_s == 0.5);
  // The data host's own work is as slow as the host.
  conditions = {};
  conditions.hosts.push_back({0, 2, 0});
  problem = changed;
  problem.asides.push_back({"prompt", problem.settings, 0, 0.5});
  const Problem slower = pipeedge::with_conditions(problem, conditions);
  const Costs slow = pipeedge::evaluate(slower, stages);
  CHECK(slow.stages[0].compute_s == 2 * after.stages[0].compute_s && slow.stages[0].data_s == 1.5);
  CHECK(slow.feeding_s == 0.5 && slow.collecting_s == 1);
  CHECK(slower.asides[0].fixed_s == 1);
}

}  // namespace

int main() {
  test_known_answers();
  test_shared_weights();
  test_infeasible();
  test_brute_force();
  test_automatic_bits();
  test_large_and_stopped();
  test_validate();
  test_evaluate_rejects_what_is_no_schedule();
  test_extreme_numbers();
  test_conditions();
  if (failures == 0) std::cout << "the core's tests pass\n";
  return failures == 0 ? 0 : 1;
}
