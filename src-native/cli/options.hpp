// The command line of sched-pipeline as a value.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"

namespace pipeedge::cli {

// A mistake on the command line. what() is one line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A "what if" question: a change to the cluster, to compare with the cluster as it is.
struct Change {
  enum class Kind { kAddHost, kRemoveHost, kScaleBandwidth };

  Kind kind = Kind::kScaleBandwidth;
  std::string name;   // device type of the hosts to add, or host to remove
  int count = 0;      // number of hosts to add
  double factor = 1;  // factor of every bandwidth
  std::string text;   // as the user wrote it
};

enum class Format { kYaml, kJson, kProblem, kFiles, kBids };
enum class Action { kSchedule, kQuestions, kHelp, kHelpAll, kVersion };

struct CommandLine {
  Action action = Action::kSchedule;
  // Empty if not given.
  std::string models_file;
  std::string dev_types_file;
  std::string dev_file;
  std::string dev_neighbors_file;
  std::string cluster_file;  // device types and devices
  std::string problem;       // a file, or - for standard input, in place of the YAML files; empty: none
  std::string evaluate;      // a schedule file, whose costs are asked for
  std::string conditions;    // a file
  yaml::Request request;
  bool joint = false;   // --plan auto
  yaml::Choice choice;  // its limits
  Options solver;
  bool auto_link_bits = false;
  int link_bits = 0;  // bits per value on links between stages; 0: uncompressed
  bool explain = false;
  bool losses = false;        // print what the loss of each host would cost
  bool survive_loss = false;  // refuse a schedule that does not survive the loss of any one host
  Format format = Format::kYaml;
  std::vector<Change> changes;

  // Whether anything is printed besides the schedule.
  bool reports() const { return explain || format == Format::kJson; }
  bool names_no_file() const {
    return (models_file + dev_types_file + dev_file + dev_neighbors_file + cluster_file).empty();
  }
};

// Parses `arguments`, without the program's name. Throws UsageError.
CommandLine parse_command_line(const std::vector<std::string>& arguments);

// The options that most people use, or all of them. `program`: what the user calls this program.
std::string help_text(const std::string& program, bool all);

}  // namespace pipeedge::cli
