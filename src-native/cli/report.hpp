// Explanation of a schedule: its bottleneck, its bound, and the hosts it does not use, with reasons. Pure.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"
#include "losses.hpp"
#include "problem_json.hpp"
#include "what_if.hpp"

namespace pipeedge::cli {

// The stage or link that determines the period of a schedule. Stages count from 0.
struct Bottleneck {
  enum class Kind { kCompute, kLink, kData };
  static constexpr int kDataHost = -1;

  Kind kind = Kind::kCompute;
  int stage = 0;                       // stage that computes or sends; kDataHost for the inputs and for kData
  int to = 0;                          // for a link, stage that receives; kDataHost for the outputs
  double seconds = 0;
  std::string words;                   // "stage 3 on rcc-0 computes 1.549 s"
};

struct Report {
  std::string model;
  std::string dtype;
  Objective objective = Objective::kThroughput;
  Problem problem;
  Solution solution;
  std::vector<StageCost> costs;        // costs of each stage
  Bottleneck bottleneck;
  std::vector<yaml::LeftOut> unused;   // in the order of the devices file, hosts without a profile last

  double items_per_s() const;          // infinite if nothing takes time
};

// `problem` is that of `named`, with the bits of its links.
Report make_report(const NamedProblem& named, const Problem& problem, Objective objective,
                   const Solution& solution);

// Explains why no schedule exists: a layer fits on no host, memory is missing, or links cannot carry what
// the memory would allow.
std::string why_infeasible(const Problem& problem);

// "proven optimal", or a bound on the distance of the schedule from the optimum.
std::string quality_text(const Solution& solution);

std::string schedule_yaml(const Problem& problem, const std::vector<Stage>& stages);
// The same, or a joint plan, for a sentence: "mb-0: [1, 24], rcc-0: [25, 48]".
std::string in_one_line(const std::string& schedule);
std::string explanation(const Report& report, std::size_t room = 0);

std::string what_if_line(const WhatIf& what_if, Objective objective, bool feasible_today,
                         const Solution& today, double items_per_s_today);

// For programs, if there is no schedule: whether that is proven.
std::string no_schedule_json(Status status);

// What was asked besides the schedule.
struct Questions {
  std::vector<WhatIf> what_ifs;
  std::optional<std::vector<Loss>> losses;   // if asked for
};

std::string report_json(const Report& report, const std::vector<std::string>& warnings, const Questions& questions);

}  // namespace pipeedge::cli
