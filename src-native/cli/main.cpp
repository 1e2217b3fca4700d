// sched-pipeline: reads options and files, and prints a schedule, or the contents of the files. Makes no decisions
// itself.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/link_bits.hpp"
#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"
#include "../yaml/wording.hpp"
#include "files_json.hpp"
#include "joint_files.hpp"
#include "joint_json.hpp"
#include "joint_report.hpp"
#include "losses.hpp"
#include "options.hpp"
#include "problem_json.hpp"
#include "report.hpp"
#include "text.hpp"
#include "what_if.hpp"

namespace pipeedge::cli {
namespace {

enum ExitCode { kDone = 0, kFault = 1, kWrongRequest = 2, kInfeasible = 3 };

// Prints lines on standard error, each behind the name by which the user knows this program.
class Messages {
 public:
  // `called`: argv[0], a path or, from `pipeedge schedule`, these words.
  explicit Messages(const std::string& called) : program_(called.substr(called.rfind('/') + 1)) {
    if (program_.empty()) program_ = "sched-pipeline";
  }
  const std::string& program() const { return program_; }
  void say(const std::string& line) const {
    std::fprintf(stderr, "%s: %s\n", program_.c_str(), line.c_str());
  }

 private:
  std::string program_;
};

// Throws std::runtime_error if standard output cannot be written, as on a full disk. A reader that has gone
// away, as `head` does once it has seen enough, is no failure.
void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    if (errno != EPIPE) {
      throw std::runtime_error("cannot write to standard output");
    }
  }
}

// Width of the terminal that shows standard error, or 0 if none does.
std::size_t room_on_standard_error() {
  if (isatty(STDERR_FILENO) == 0) return 0;
  const char* given = std::getenv("COLUMNS");
  const int columns = given != nullptr ? std::atoi(given) : 0;
  if (columns > 0) return static_cast<std::size_t>(columns);
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string read_standard_input() {
  std::string text;
  std::vector<char> chunk(std::size_t{1} << 16);
  while (const std::size_t got = std::fread(chunk.data(), 1, chunk.size(), stdin)) {
    if (text.size() + got > yaml::kMaxFileBytes) throw UsageError("standard input is larger than 64 MiB");
    text.append(chunk.data(), got);
  }
  if (std::ferror(stdin) != 0) throw UsageError("standard input cannot be read completely");
  return text;
}

// The files of a request.
struct RequestFiles {
  yaml::Models models;
  yaml::DeviceTypes types;
  yaml::Devices devices;
  std::optional<yaml::Neighbors> neighbors;

  const yaml::Neighbors* known_links() const { return neighbors ? &*neighbors : nullptr; }
};

RequestFiles read_files(const CommandLine& line) {
  const auto document = [](const std::string& given, const char* usual, const char* option) {
    const std::string file = given.empty() ? usual : given;
    if (!std::filesystem::exists(file)) {
      throw UsageError(yaml::printable(file, 400) + ": no such file; " + option + " FILE names another");
    }
    return yaml::read_document(file);
  };
  RequestFiles files{yaml::models_from(document(line.models_file, "models.yml", "-sm")), {}, {}, {}};
  if (line.cluster_file.empty()) {
    files.types = yaml::device_types_from(document(line.dev_types_file, "device_types.yml", "-sdt"));
    files.devices = yaml::devices_from(document(line.dev_file, "devices.yml", "-sd"));
  } else {
    yaml::Cluster cluster = yaml::read_cluster(line.cluster_file);
    files.types = std::move(cluster.types);
    files.devices = std::move(cluster.devices);
  }
  if (!line.dev_neighbors_file.empty()) {
    files.neighbors = yaml::neighbors_from(document(line.dev_neighbors_file, "", "--dev-neighbors-file"));
  }
  return files;
}

// The host of rank 0 in a run without -H: the one of that name, or the first of the devices file.
std::string first_host(const yaml::Devices& devices) {
  std::string first;
  for (const yaml::TypeHosts& entry : devices.entries) {
    for (const std::string& host : entry.hosts) {
      if (first.empty() || host == "0") first = host;
    }
  }
  return first;
}

SpecFiles read_given_files(const CommandLine& line) {
  SpecFiles files;
  if (!line.models_file.empty()) files.models = yaml::models_from(yaml::read_document(line.models_file));
  if (!line.dev_types_file.empty()) files.types = yaml::device_types_from(yaml::read_document(line.dev_types_file));
  if (!line.dev_file.empty()) files.devices = yaml::devices_from(yaml::read_document(line.dev_file));
  if (!line.cluster_file.empty()) {
    yaml::Cluster cluster = yaml::read_cluster(line.cluster_file);
    files.types = std::move(cluster.types);
    files.devices = std::move(cluster.devices);
  }
  if (!line.dev_neighbors_file.empty()) {
    files.neighbors = yaml::neighbors_from(yaml::read_document(line.dev_neighbors_file));
  }
  return files;
}

NamedProblem read_request(const CommandLine& line) {
  if (line.problem.empty()) {
    const RequestFiles files = read_files(line);
    return {yaml::assemble(files.models, files.types, files.devices, files.known_links(), line.request),
            line.request.model, std::string(yaml::short_dtype(line.request.dtype))};
  }
  if (line.problem == "-") return read_problem(read_standard_input(), "standard input");
  return read_problem(yaml::read_text(line.problem), line.problem);
}

NamedJoint read_joint_request(const CommandLine& line) {
  if (line.problem.empty()) {
    const RequestFiles files = read_files(line);
    return joint_of_files(files.models, files.types, files.devices, files.known_links(), line.request,
                          line.joint_request);
  }
  if (line.problem == "-") return read_joint(read_standard_input(), "standard input");
  return read_joint(yaml::read_text(line.problem), line.problem);
}

// One entry for each change and, if there are several, one for all of them together.
struct Scenario {
  std::string text;
  Problem problem;
};

std::vector<Scenario> scenarios(const Problem& today, const std::vector<Change>& changes) {
  std::vector<Scenario> found;
  Scenario together{"", today};
  for (const Change& change : changes) {
    found.push_back({change.text, changed(today, change)});
    together.text += (together.text.empty() ? "" : " ") + change.text;
    together.problem = changed(together.problem, change);
  }
  if (found.size() > 1) found.push_back(std::move(together));
  return found;
}

// With the requested bits, which the solution's problem has.
AutoBits solved(const Problem& problem, const CommandLine& line) {
  if (line.auto_link_bits) return solve_with_auto_bits(problem, line.solver);
  AutoBits answer{with_link_bits(problem, line.link_bits), {}};
  answer.solution = solve(answer.problem, line.solver);
  return answer;
}

WhatIf answer(const Problem& asked, const CommandLine& line) {
  WhatIf result;
  if (asked.hosts.empty()) {
    result.solution.status = Status::kInfeasible;
    result.why = "no host is left";
    return result;
  }
  result.solution = solved(asked, line).solution;
  result.feasible = !result.solution.stages.empty();
  if (result.feasible) {
    const double period = result.solution.bottleneck_s;
    result.items_per_s = period > 0 ? asked.batch_size / period : kInfinity;
  } else if (result.solution.status == Status::kInfeasible) {
    result.why = why_infeasible(asked);
  } else {
    result.why = "none was found within the time limit";
  }
  return result;
}

// Prints no schedule, and why some host's loss cannot be taken.
int refuse_loss(const CommandLine& line, const Messages& messages, const Problem& problem, const Loss& fatal) {
  if (line.format == Format::kJson && !line.problem.empty()) print(no_schedule_json(fatal.after.solution.status));
  messages.say("error: " + std::string(fatal.effect == Loss::Effect::kEnds
                                           ? "no schedule survives the loss of any one host: "
                                           : "it is undecided whether the loss of any one host can be taken: ") +
      fatal_text(problem, fatal) + (fatal.effect == Loss::Effect::kEnds ? "" : "; raise --time-limit"));
  return kInfeasible;
}

// A plan as it is printed, and its throughput.
struct PrintedPlan {
  Status status = Status::kUnknown;
  std::string yaml;
  double items_per_s = 0;
};

PrintedPlan printed(const AutoBits& found) {
  const Solution& solution = found.solution;
  const double items = found.problem.batch_size;
  return {solution.status, schedule_yaml(found.problem, solution.stages),
          solution.bottleneck_s > 0 ? items / solution.bottleneck_s : kInfinity};
}

PrintedPlan printed(const NamedJoint& joint, const JointSolution& solution) {
  return {solution.status, joint_yaml(joint, solution),
          solution.period_s > 0 ? solution.batch_size / solution.period_s : kInfinity};
}

// Without --data-host, nothing is counted for the data rank. A run counts it, on the host of rank 0: says which plan
// it would take if that is another one than `here`, in the time that is left of the limit, if that is enough to tell.
// `solve_again`: plans for a command line with a data host.
void say_plan_of_run(const CommandLine& line, const Messages& messages, const PrintedPlan& here, double elapsed_s,
                     const std::function<PrintedPlan(const CommandLine&)>& solve_again) {
  if (!line.problem.empty() || line.format != Format::kYaml || !line.request.data_host.empty()) return;
  if (here.status != Status::kOptimal || elapsed_s >= line.solver.time_limit_s) return;
  CommandLine of_run = line;
  of_run.solver.time_limit_s -= elapsed_s;
  try {
    of_run.request.data_host =
        line.request.hosts.empty() ? first_host(read_files(line).devices) : line.request.hosts.front();
    const PrintedPlan there = solve_again(of_run);
    if (there.status == Status::kUnknown || there.status == Status::kBounded || there.yaml == here.yaml) return;
    const std::string host = yaml::printable(of_run.request.data_host);
    messages.say("a run with its data on " + host + (there.status == Status::kInfeasible
        ? " has no feasible plan"
        : " takes another plan (" + rate_text(there.items_per_s) + "): " + in_one_line(there.yaml)) +
        "; see --data-host " + host);
  } catch (const yaml::SpecError&) {
    // The files do not have that host, so a run does not count its links either.
  }
}

int run(const CommandLine& line, const Messages& messages) {
  const NamedProblem named = read_request(line);
  const yaml::Assembly& assembly = named.assembly;
  validate(assembly.problem);
  if (line.format == Format::kProblem) {
    print(problem_json(named));
    return kDone;
  }
  const std::vector<Scenario> questions = scenarios(assembly.problem, line.changes);
  for (const std::string& warning : assembly.warnings) messages.say("warning: " + warning);

  const auto [problem, solution] = solved(assembly.problem, line);
  const bool feasible = !solution.stages.empty();
  std::optional<Report> report;
  Questions asked;
  if (feasible) report = make_report(named, problem, line.solver.objective, solution);
  if (feasible && (line.losses || line.survive_loss)) {
    asked.losses = find_losses(assembly.problem, solution, [&](const Problem& rest) { return answer(rest, line); });
  }
  const Loss* const fatal = line.survive_loss && asked.losses ? first_fatal(*asked.losses) : nullptr;
  if (feasible && fatal == nullptr && line.format == Format::kYaml) print(schedule_yaml(problem, solution.stages));
  if (feasible && line.explain) std::fputs(explanation(*report, room_on_standard_error()).c_str(), stderr);
  if (feasible && line.losses) {
    std::fputs(losses_text(problem, *asked.losses, line.solver.objective, report->items_per_s()).c_str(), stderr);
  }
  if (feasible && solution.status != Status::kOptimal) {
    messages.say("stopped after " + seconds_text(solution.elapsed_s) + ": gap " + percent_text(solution.gap()) +
        ", the optimum is not below " + seconds_text(solution.lower_bound));
  }

  for (const Scenario& question : questions) {
    asked.what_ifs.push_back(answer(question.problem, line));
    asked.what_ifs.back().text = question.text;
    messages.say(what_if_line(asked.what_ifs.back(), line.solver.objective, feasible, solution,
                     feasible ? report->items_per_s() : 0));
  }
  if (fatal != nullptr) return refuse_loss(line, messages, problem, *fatal);
  if (feasible) {
    say_plan_of_run(line, messages, printed({problem, solution}), solution.elapsed_s, [](const CommandLine& of_run) {
      return printed(solved(read_request(of_run).assembly.problem, of_run));
    });
    if (line.format == Format::kJson) print(report_json(*report, assembly.warnings, asked));
    return kDone;
  }
  if (line.format == Format::kJson && !line.problem.empty()) print(no_schedule_json(solution.status));
  if (solution.status == Status::kInfeasible) {
    messages.say("error: no feasible schedule: " + why_infeasible(problem));
  } else {
    messages.say("error: no schedule was found within the time limit of " + seconds_text(line.solver.time_limit_s) +
        ", and none could be ruled out; raise --time-limit");
  }
  return kInfeasible;
}

// Throws UsageError if the energy of a plan may not be known.
void require_watts(const NamedJoint& joint, const std::string& problem) {
  std::vector<std::string> unknown;
  for (const std::string& host : unknown_watts(joint.problem)) unknown.push_back(yaml::printable(host));
  if (unknown.empty()) return;
  const std::string keys = problem.empty() ? "busy_W (and idle_W)" : "busy_w (and idle_w)";
  throw UsageError("--objective energy: the power of " + yaml::listing(unknown) + " is unknown; write " + keys +
                   " into the device type, in watts as a meter shows them, profile it where profiler.py can measure "
                   "energy, or leave it out of --hosts");
}

int run_jointly(const CommandLine& line, const Messages& messages) {
  const NamedJoint joint = read_joint_request(line);
  validate(joint.problem);
  if (line.format == Format::kProblem) {
    print(joint_json(joint));
    return kDone;
  }
  for (const std::string& warning : joint.warnings) messages.say("warning: " + warning);
  if (line.solver.objective == Objective::kEnergy) require_watts(joint, line.problem);
  const JointSolution solution = solve(joint.problem, line.solver);
  if (solution.stages.empty()) {
    if (line.format == Format::kJson && !line.problem.empty()) {
      print(no_schedule_json(solution.status));
    }
    if (solution.status == Status::kInfeasible) {
      messages.say("error: no feasible plan: " + why_no_plan(joint, line.solver));
    } else {
      messages.say("error: no plan was found within the time limit of " + seconds_text(line.solver.time_limit_s) +
          ", and none could be ruled out; raise --time-limit");
    }
    return kInfeasible;
  }
  std::vector<NextBest> others;
  if (line.explain) others = next_best(joint.problem, solution, line.solver);
  if (line.format == Format::kYaml) print(joint_yaml(joint, solution));
  if (line.explain) {
    std::fputs(joint_explanation(joint, solution, line.solver, others, room_on_standard_error()).c_str(), stderr);
  }
  if (solution.status != Status::kOptimal) {
    messages.say("stopped after " + seconds_text(solution.elapsed_s) + ": gap " + percent_text(solution.gap()));
  }
  say_plan_of_run(line, messages, printed(joint, solution), solution.elapsed_s, [](const CommandLine& of_run) {
    const NamedJoint there = read_joint_request(of_run);
    return printed(there, solve(there.problem, of_run.solver));
  });
  if (line.format == Format::kJson) print(joint_report_json(joint, solution, line.solver, others));
  return kDone;
}

int main_with_faults(const std::vector<std::string>& arguments, const Messages& messages) {
  const CommandLine line = parse_command_line(arguments);
  switch (line.action) {
    case Action::kHelp: print(help_text(messages.program())); return kDone;
    case Action::kVersion: print("sched-pipeline (PipeEdge) " PIPEEDGE_VERSION "\n"); return kDone;
    case Action::kSchedule: break;
  }
  if (line.format != Format::kFiles) return line.joint ? run_jointly(line, messages) : run(line, messages);
  print(files_json(read_given_files(line)));
  return kDone;
}

}  // namespace
}  // namespace pipeedge::cli

int main(int argc, char** argv) {
  using namespace pipeedge;
  const cli::Messages messages(argc > 0 ? argv[0] : "");
#ifdef SIGPIPE
  std::signal(SIGPIPE, SIG_IGN);  // so that the status is the same as that of the other programs
#endif
  try {
    return cli::main_with_faults({argv + std::min(argc, 1), argv + argc}, messages);
  } catch (const cli::UsageError& error) {
    messages.say(std::string("error: ") + error.what());
    return cli::kWrongRequest;
  } catch (const yaml::SpecError& error) {
    messages.say(std::string("error: ") + error.what());
    return cli::kWrongRequest;
  } catch (const std::bad_alloc&) {
    messages.say("error: out of memory");
    return cli::kFault;
  } catch (const std::exception& error) {
    messages.say(std::string("error: ") + error.what());
    return cli::kFault;
  }
}
