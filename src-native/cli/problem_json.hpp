// A problem as JSON, as --problem reads and --format=problem prints it. docs/file-formats.md describes the keys.
//
//   one setting:   {"batch_size": 8, "types": [...], "hosts": [...], ...}
//   several:       {"settings": [{as above}, ...], "widths": [{"bits": 8, "loss": [...]}, ...], "max_loss": 0.01, ...}
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../core/conditions.hpp"
#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"
#include "../yaml/tree.hpp"
#include "console.hpp"
#include "text.hpp"

namespace pipeedge::cli {

// A plan to be evaluated, as a schedule file or the key "plans" has it: its stages in order.
struct GivenStage {
  std::string host;
  int first = 0;  // half-open, from 0
  int last = 0;
  int bits = 0;       // on the link to the next stage
  std::string dtype;  // empty: that of the only setting in which the host was profiled
};
using GivenPlan = std::vector<GivenStage>;

// A problem with what reports say about it.
struct NamedProblem {
  std::string model;
  std::string dtype;   // that was asked for, if the plan does not choose it
  bool joint = false;  // whether the plan chooses microbatch size, number types and bits
  Problem problem;
  std::vector<yaml::LeftOut> left_out;
  std::vector<std::string> warnings;
  std::vector<GivenPlan> plans;      // to be evaluated; empty: the best one is asked for
  std::vector<Conditions> moments;   // under which each of them is to be evaluated as well
  GivenPlan running;                 // the plan that another one is to take over from; empty: none
  std::optional<yaml::Texts> texts;  // that a decoder is planned for, complete
  GivenPlan loaded;                  // layers that hosts have loaded, in any order

  // Whether losses are known, rather than only ranking plans because agreement does not matter.
  bool losses_known() const { return problem.max_loss < kInfinity; }
};

// `name` is the name of the text in messages. Throws yaml::SpecError.
NamedProblem read_problem(std::string text, const std::string& name);
// These read a file, or the console's input (-). Throw yaml::SpecError or UsageError.
NamedProblem read_problem(const std::string& file, Console& console);
// Plans of a schedule file: YAML, as this program prints schedules.
GivenPlan read_plan(const std::string& file, Console& console);
// Puts a problem under the conditions of a file.
void apply_conditions(NamedProblem& named, const std::string& file, Console& console);

std::string problem_json(const NamedProblem& named);
// What each host would bid for each stage, in a problem with one setting.
std::string bids_json(const Problem& problem);
void write_left_out(JsonWriter& json, const char* key, const std::vector<yaml::LeftOut>& hosts);
void write_texts(JsonWriter& json, const char* key, const std::vector<std::string>& lines);

}  // namespace pipeedge::cli
