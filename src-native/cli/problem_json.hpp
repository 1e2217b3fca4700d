// A problem as JSON, as --problem reads and --format=problem prints it. docs/scheduler.md describes the keys.
#pragma once

#include <string>

#include "../yaml/assembly.hpp"

namespace pipeedge::cli {

struct NamedProblem {
  yaml::Assembly assembly;
  std::string model;                   // names for reports
  std::string dtype;
};

// `name` is the name of the text in messages. Throws yaml::SpecError.
NamedProblem read_problem(const std::string& text, const std::string& name);

std::string problem_json(const NamedProblem& named);

}  // namespace pipeedge::cli
