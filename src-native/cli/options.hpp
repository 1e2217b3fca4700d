// The command line of sched-pipeline as a value.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/problem.hpp"
#include "../yaml/specs.hpp"

namespace pipeedge::cli {

// The command line asks for something that is not there. what(): one line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One "what if": a change to the cluster, to be judged beside the cluster as it is.
struct Change {
  enum class Kind { kAddHost, kRemoveHost, kScaleBandwidth };

  Kind kind = Kind::kScaleBandwidth;
  std::string name;                    // the type to add hosts of, or the host to remove
  int count = 0;                       // hosts to add
  double factor = 1;                   // of every bandwidth
  std::string text;                    // as the user wrote it
};

enum class Format { kYaml, kJson, kProblem };
enum class Action { kSchedule, kHelp, kVersion };

struct CommandLine {
  Action action = Action::kSchedule;
  std::string models_file = "models.yml";
  std::string dev_types_file = "device_types.yml";
  std::string dev_file = "devices.yml";
  std::string dev_neighbors_file;      // empty: none
  std::string problem;                 // a file, or - for standard input, instead of the YAML files; empty: none
  yaml::Request request;
  Options solver;
  bool auto_link_bits = false;
  int link_bits = 0;                   // a value on links between stages; 0: as it is
  bool explain = false;
  Format format = Format::kYaml;
  std::vector<Change> changes;
};

// Throws UsageError. `arguments` without the program's name.
CommandLine parse_command_line(const std::vector<std::string>& arguments);

// `program`: what the user calls this program.
std::string help_text(const std::string& program);

}  // namespace pipeedge::cli
