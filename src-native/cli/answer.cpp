#include "answer.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "../core/conditions.hpp"
#include "../core/link_bits.hpp"
#include "../yaml/wording.hpp"

namespace pipeedge::cli {
namespace {

std::vector<std::string> printable_all(const std::set<std::string>& names) {
  std::vector<std::string> shown;
  for (const std::string& name : names) shown.push_back(yaml::printable(name));
  return shown;
}

// `problem` with a change applied, which may have no hosts. Throws UsageError if the change names an unknown type or
// host, or removes the data host.
Problem changed(const Problem& problem, const Change& change) {
  if (change.kind == Change::Kind::kScaleBandwidth) return with_bandwidth(problem, change.factor);
  const std::string text = yaml::printable(change.text);
  if (change.kind == Change::Kind::kAddHost) {
    Problem larger = with_hosts(problem, change.name, change.count);
    if (larger.hosts.size() > problem.hosts.size()) return larger;
    std::set<std::string> names;
    for (const Setting& setting : problem.settings) {
      for (const DeviceType& type : setting.types) names.insert(type.name);
    }
    throw UsageError(text + ": no such device type with a profile for the request; there are: " +
                     yaml::listing(printable_all(names)));
  }
  const auto found = std::find(problem.hosts.begin(), problem.hosts.end(), change.name);
  if (found == problem.hosts.end()) {
    throw UsageError(text + ": no such host to schedule on; there are: " +
                     yaml::listing(printable_all({problem.hosts.begin(), problem.hosts.end()})));
  }
  const int gone = static_cast<int>(found - problem.hosts.begin());
  if (gone == problem.data_host) throw UsageError(text + ": it is the data host; name another with --data-host");
  return without_host(problem, gone);
}

// What hosts have loaded, as far as the problem knows them.
Before before_of(const NamedProblem& named) {
  Before before;
  before.runs = !named.running.empty();
  const Problem& problem = named.problem;
  for (const GivenStage& one : before.runs ? named.running : named.loaded) {
    const auto host = std::find(problem.hosts.begin(), problem.hosts.end(), one.host);
    const auto width = std::find_if(problem.widths.begin(), problem.widths.end(),
                                    [&](const Width& known) { return known.bits == one.bits; });
    if (one.last > problem.layers()) throw UsageError("layers are loaded that the model does not have");
    before.stages.push_back(
        {host == problem.hosts.end() ? LoadedStage::kGone : static_cast<int>(host - problem.hosts.begin()), one.first,
         one.last, one.dtype, width == problem.widths.end() ? 0 : static_cast<int>(width - problem.widths.begin())});
  }
  return before;
}

// Adds what the stages of an answer cost.
void add_costs(Answer& answer) {
  const Problem& problem = answer.named.problem;
  Solution& solution = answer.solution;
  answer.costs = evaluate(problem, solution.stages);
  add_before(problem, answer.before, solution.stages, answer.costs);
  solution.batch_size = problem.setting(solution.stages.front().setting).batch_size;
  solution.period_s = answer.costs.period_s;
  solution.latency_s = answer.costs.latency_s;
  solution.loss = answer.costs.loss;
  switch (answer.options.objective) {
    case Objective::kThroughput: solution.objective = solution.period_s / solution.batch_size; break;
    case Objective::kLatency: solution.objective = solution.latency_s; break;
    case Objective::kEnergy: solution.objective = answer.costs.joules.value_or(kInfinity) / solution.batch_size; break;
  }
  if (solution.objective > loosened(solution.lower_bound)) solution.status = Status::kBounded;
}

class Planner {
 public:
  Planner(NamedProblem named, const CommandLine& line) : line_(line) {
    answer_.named = std::move(named);
    answer_.options = line.solver;
    answer_.before = before_of(answer_.named);
  }

  Answer plan_only() {
    answer_.solution = solve_as_asked(answer_.named.problem);
    return std::move(answer_);
  }

  Answer plan() {
    const Problem& problem = answer_.named.problem;
    const std::vector<WhatIf> questions = what_ifs();  // wrong ones are refused before the search
    answer_.solution = solve_as_asked(answer_.before.runs ? beside(problem, answer_.before) : problem);
    if (answer_.found()) {
      answer_.costs = evaluate(problem, answer_.solution.stages);
      if (answer_.before.known()) {
        answer_.solution.stages = follow(problem, answer_.before, line_.solver, answer_.solution.stages);
        add_costs(answer_);
      }
      if (line_.reports()) add_unused();
      if (line_.losses || line_.survive_loss) add_losses();
      if (line_.explain && answer_.named.joint) {
        answer_.next_best = next_best(problem, answer_.solution, line_.solver);
      }
    } else if (answer_.solution.status == Status::kInfeasible) {
      answer_.why = why_no_plan(problem, line_.solver);
    }
    for (std::size_t q = 0; q < questions.size(); ++q) answer_.what_ifs.push_back(answered(questions[q], changed_[q]));
    return std::move(answer_);
  }

 private:
  Solution solve_as_asked(const Problem& problem) const {
    if (problem.hosts.empty()) {
      Solution none;
      none.status = Status::kInfeasible;
      return none;
    }
    return line_.auto_link_bits ? solve_with_auto_bits(problem, line_.solver) : solve(problem, line_.solver);
  }

  // One question for each change and, if there are several, one for all of them together.
  std::vector<WhatIf> what_ifs() {
    std::vector<WhatIf> questions;
    const Problem& today = answer_.named.problem;
    WhatIf together;
    Problem all = today;
    for (const Change& change : line_.changes) {
      questions.push_back({change.text, {}, {}});
      changed_.push_back(changed(today, change));
      together.text += (together.text.empty() ? "" : " ") + change.text;
      all = changed(all, change);
    }
    if (questions.size() > 1) {
      questions.push_back(std::move(together));
      changed_.push_back(std::move(all));
    }
    return questions;
  }

  WhatIf answered(WhatIf question, const Problem& problem) const {
    question.solution = solve_as_asked(problem);
    if (question.solution.status == Status::kInfeasible) question.why = why_no_plan(problem, line_.solver);
    return question;
  }

  void add_unused() {
    const Problem& problem = answer_.named.problem;
    std::set<int> used;
    for (const Stage& stage : answer_.solution.stages) used.insert(stage.host);
    for (int host = 0; host < problem.host_count(); ++host) {
      const auto bids = [&](const Setting& setting) {
        return setting.type(host) == nullptr || setting.type(host)->bids();
      };
      // A data host without a profile is among those left out.
      if (used.count(host) != 0 || std::all_of(problem.settings.begin(), problem.settings.end(), bids)) continue;
      answer_.unused.push_back({host, why_unused(problem, host, line_.solver.objective, answer_.solution)});
    }
  }

  void add_losses() {
    const Problem& problem = answer_.named.problem;
    answer_.losses.emplace();
    const std::vector<Loss> losses = find_losses(
        problem, answer_.solution, [&](const Problem& rest) { return solve_as_asked(rest); }, line_.solver);
    const Loss* const fatal = line_.survive_loss ? first_fatal(losses) : nullptr;
    for (const Loss& loss : losses) {
      LossOfHost one{loss, {}};
      if (loss.effect == Loss::Effect::kEnds && !loss.of_data_host) {
        one.why = why_no_plan(without_host(problem, loss.host), line_.solver);
      }
      answer_.losses->push_back(std::move(one));
    }
    if (fatal != nullptr) answer_.refused = fatal->host;
  }

  const CommandLine& line_;
  Answer answer_;
  std::vector<Problem> changed_;  // by question
};

// The stages of a given plan, at the first microbatch size for which all of them were profiled or, where any of them
// may be taken for the same items under way, at that with the most items a second.
std::vector<Stage> stages_of(Problem& problem, const GivenPlan& given) {
  std::string lacking;
  std::vector<Stage> best;
  double least_s = kInfinity;
  for (const Setting& candidate : problem.settings) {
    std::vector<Stage> stages;
    for (const GivenStage& one : given) {
      const auto host = std::find(problem.hosts.begin(), problem.hosts.end(), one.host);
      if (host == problem.hosts.end()) {
        throw UsageError("the plan names the host " + yaml::printable(one.host) +
                         "; there are: " + yaml::listing(printable_all({problem.hosts.begin(), problem.hosts.end()})));
      }
      Stage stage{static_cast<int>(host - problem.hosts.begin()), one.first, one.last, -1, 0};
      for (std::size_t s = 0; s < problem.settings.size() && stage.setting < 0; ++s) {
        const Setting& setting = problem.settings[s];
        const DeviceType* const type = setting.type(stage.host);
        if (setting.batch_size != candidate.batch_size || type == nullptr) continue;
        // A schedule names no number type where it is float32, or where all have the same.
        const std::string wanted = one.dtype.empty() && problem.settings.size() > 1 ? "float32" : one.dtype;
        if (wanted.empty() || wanted == type->notes.dtype || wanted == setting.dtype)
          stage.setting = static_cast<int>(s);
      }
      if (stage.setting < 0) {
        lacking = yaml::printable(one.host) + (one.dtype.empty() ? "" : " in " + yaml::printable(one.dtype));
        break;
      }
      const auto width = std::find_if(problem.widths.begin(), problem.widths.end(),
                                      [&](const Width& known) { return known.bits == one.bits; });
      stage.width = static_cast<int>(width - problem.widths.begin());
      if (width == problem.widths.end()) problem.widths.push_back({one.bits, {}});
      stages.push_back(stage);
    }
    if (stages.size() != given.size()) continue;
    if (!problem.returns()) return stages;
    const double period_s = evaluate(problem, stages).period_s / candidate.batch_size;
    if (best.empty() || period_s < least_s) {
      best = std::move(stages);
      least_s = period_s;
    }
  }
  if (!best.empty()) return best;
  throw UsageError("the plan has a stage on " + lacking + ", which has no such profile");
}

}  // namespace

Answer plan(NamedProblem named, const CommandLine& line) { return Planner(std::move(named), line).plan(); }

Answer plan_only(NamedProblem named, const CommandLine& line) { return Planner(std::move(named), line).plan_only(); }

Answer evaluate_plan(NamedProblem named, const GivenPlan& given, const CommandLine& line) {
  Answer answer;
  answer.named = std::move(named);
  answer.options = line.solver;
  answer.given = true;
  answer.before = before_of(answer.named);
  try {
    answer.solution.stages = stages_of(answer.named.problem, given);
    add_costs(answer);
  } catch (const std::invalid_argument& error) {
    throw UsageError(std::string("the plan: ") + error.what());
  }
  answer.solution.status = Status::kOptimal;
  answer.solution.lower_bound = answer.solution.objective;
  return answer;
}

std::vector<Answer> evaluate_plans(const NamedProblem& named, const CommandLine& line) {
  std::vector<Answer> answers;
  for (const GivenPlan& plan : named.plans) answers.push_back(evaluate_plan(named, plan, line));
  NamedProblem moment = named;
  moment.running.clear();
  moment.loaded.clear();
  for (const Conditions& conditions : named.moments) {
    try {
      moment.problem = with_conditions(named.problem, conditions);
    } catch (const std::invalid_argument& error) {
      throw UsageError(std::string("a moment: ") + error.what());
    }
    for (std::size_t p = 0; p < answers.size(); ++p) {
      Answer then = evaluate_plan(moment, named.plans[p], line);
      answers[p].moments.push_back({then.solution.batch_size, std::move(then.costs)});
    }
  }
  return answers;
}

}  // namespace pipeedge::cli
