// What the program finds out for a request, before anything is put into words (report.hpp).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../core/alternatives.hpp"
#include "../core/costs.hpp"
#include "../core/reasons.hpp"
#include "../core/takeover.hpp"
#include "options.hpp"
#include "problem_json.hpp"

namespace pipeedge::cli {

// The plan of a changed cluster, or why there is none.
struct WhatIf {
  std::string text;  // "--add-host RCC=2"
  Solution solution;
  std::optional<WhyNone> why;
};

struct LossOfHost {
  Loss loss;
  std::optional<WhyNone> why;  // the others cannot run all layers
};

// A host without a stage.
struct Unused {
  int host = 0;
  WhyUnused why;
};

// A plan under other conditions, with the microbatch size that is best then.
struct Moment {
  double batch_size = 0;
  Costs costs;
};

struct Answer {
  NamedProblem named;  // with the widths that were asked for
  Options options;
  bool given = false;  // whether the plan was given, rather than found
  Before before;       // the plan that it follows, if one is known
  Solution solution;
  Costs costs;                  // of the plan, if there is one
  std::vector<Moment> moments;  // ... under other conditions, if asked for
  std::optional<WhyNone> why;   // there is none
  std::vector<Unused> unused;   // in the order of the devices file
  std::vector<WhatIf> what_ifs;
  std::optional<std::vector<LossOfHost>> losses;  // if asked for
  std::vector<NextBest> next_best;                // if asked for

  bool found() const { return !solution.stages.empty(); }
  // The loss that the request does not accept; null if there is none.
  const LossOfHost* fatal() const { return refused < 0 ? nullptr : &(*losses)[static_cast<std::size_t>(refused)]; }
  int refused = -1;  // its host
};

// Finds the best plan, and answers what else was asked.
Answer plan(NamedProblem named, const CommandLine& line);

// Finds the best plan, and nothing else.
Answer plan_only(NamedProblem named, const CommandLine& line);

// The costs of a plan. Throws UsageError if it is none for the problem.
Answer evaluate_plan(NamedProblem named, const GivenPlan& given, const CommandLine& line);

// The same for each plan that a problem lists, at each of its moments as well.
std::vector<Answer> evaluate_plans(const NamedProblem& named, const CommandLine& line);

}  // namespace pipeedge::cli
