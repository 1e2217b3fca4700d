// A problem as JSON, as --problem reads and --format=problem prints it. docs/scheduler.md describes the keys.
#pragma once

#include <string>

#include "../yaml/assembly.hpp"
#include "../yaml/tree.hpp"
#include "text.hpp"

namespace pipeedge::cli {

struct NamedProblem {
  yaml::Assembly assembly;
  std::string model;                   // names for reports
  std::string dtype;
};

constexpr double kLargestInProblem = 1e21;  // the largest number of MB in a YAML file, in bytes

// `name` is the name of the text in messages. Throws yaml::SpecError.
NamedProblem read_problem(const std::string& text, const std::string& name);
NamedProblem problem_from(const yaml::View& root);

std::string problem_json(const NamedProblem& named);
void write_problem(JsonWriter& json, const NamedProblem& named);

// The number under a key; `otherwise` if it is missing or null.
double number_or(const yaml::View& view, const char* key, double otherwise);

}  // namespace pipeedge::cli
