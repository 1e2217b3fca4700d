// A joint plan in words, as YAML and as JSON, and what other choices would cost. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../core/joint.hpp"
#include "joint_json.hpp"

namespace pipeedge::cli {

// A choice of a plan, and the next best in its place.
struct NextBest {
  std::string choice;                  // "stage 1 computes in int8"
  std::string instead;                 // "bfloat16"; empty: there is nothing else
  bool feasible = false;
  double objective = kInfinity;        // as JointSolution::objective
  double loss = 0;
  bool planned_anew = false;           // with all other choices made anew; else with all others as they are
};

// Hosts, microbatch size and number types of the plan are planned anew without what was chosen; a stage's number
// type and a link's bits are changed with all others as they are.
std::vector<NextBest> next_best(const JointProblem& problem, const JointSolution& solution, const Options& options);

std::string joint_yaml(const NamedJoint& joint, const JointSolution& solution);
// Its table leaves columns out if it would be wider than `room` characters, unless that is 0.
std::string joint_explanation(const NamedJoint& joint, const JointSolution& solution, const Options& options,
                              const std::vector<NextBest>& others, std::size_t room = 0);
std::string joint_report_json(const NamedJoint& joint, const JointSolution& solution, const Options& options,
                              const std::vector<NextBest>& others);
// The reason why there is no plan, as far as one of the limits is.
std::string why_no_plan(const NamedJoint& joint, const Options& options);

}  // namespace pipeedge::cli
