// A problem as JSON: what --problem reads and --format=problem prints. The table of keys is in
// docs/scheduler.md.
#pragma once

#include <string>

#include "../yaml/specs.hpp"

namespace pipeedge::cli {

struct NamedProblem {
  yaml::Assembly assembly;
  std::string model;                   // names for reports
  std::string dtype;
};

// `name` is what messages call the text. Throws yaml::SpecError.
NamedProblem read_problem(const std::string& text, const std::string& name);

std::string problem_json(const NamedProblem& named);

}  // namespace pipeedge::cli
