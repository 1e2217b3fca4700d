// sched-pipeline: reads options and files, and prints a schedule, or the contents of the files. Makes no decisions
// itself.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/link_bits.hpp"
#include "../core/problem.hpp"
#include "../yaml/assembly.hpp"
#include "../yaml/wording.hpp"
#include "answer.hpp"
#include "files_json.hpp"
#include "options.hpp"
#include "problem_json.hpp"
#include "report.hpp"
#include "text.hpp"

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
  void say(const std::string& line) const { std::fprintf(stderr, "%s: %s\n", program_.c_str(), line.c_str()); }

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

// The files of a request.
struct RequestFiles {
  yaml::Models models;
  yaml::DeviceTypes types;
  yaml::Devices devices;
  std::optional<yaml::Neighbors> neighbors;

  const yaml::Neighbors* known_links() const { return neighbors ? &*neighbors : nullptr; }
};

// A host of each device type, by its name.
yaml::Devices one_of_each(const yaml::DeviceTypes& types) {
  JsonWriter json;
  json.open('{');
  for (const yaml::TypeSpec& type : types.entries) json.key(type.name).open('[').value(type.name).close(']');
  json.close('}');
  return yaml::devices_from(yaml::parse(json.text(), "the device types"));
}

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
    files.devices = line.format == Format::kBids ? one_of_each(files.types)
                                                 : yaml::devices_from(document(line.dev_file, "devices.yml", "-sd"));
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
  NamedProblem named;
  if (line.problem.empty()) {
    const RequestFiles files = read_files(line);
    yaml::Assembly assembly =
        yaml::assemble(files.models, files.types, files.devices, files.known_links(), line.request);
    named.model = line.request.model;
    named.dtype = std::string(yaml::short_dtype(line.request.dtype));
    named.problem = std::move(assembly.problem);
    named.left_out = std::move(assembly.left_out);
    named.warnings = std::move(assembly.warnings);
    named.texts = assembly.texts;
  } else {
    named = read_problem(line.problem);
  }
  named.joint = named.joint || line.joint;
  validate(named.problem);
  return named;
}

// The problem under the conditions of a file, and with the widths that were asked for.
void apply_options(NamedProblem& named, const CommandLine& line) {
  if (!line.conditions.empty()) apply_conditions(named, line.conditions);
  if (named.joint) return;
  named.problem = line.auto_link_bits ? with_all_link_bits(std::move(named.problem))
                                      : with_link_bits(std::move(named.problem), line.link_bits);
}

// Throws UsageError if the energy of a plan may not be known.
void require_watts(const Problem& problem, bool of_files) {
  std::vector<std::string> unknown;
  for (const int host : hosts_without_watts(problem)) {
    unknown.push_back(yaml::printable(problem.hosts[static_cast<std::size_t>(host)]));
  }
  if (unknown.empty()) return;
  const std::string keys = of_files ? "busy_W (and idle_W)" : "busy_w (and idle_w)";
  throw UsageError(
      "--objective energy: the power of " + yaml::listing(unknown) + " is unknown; write " + keys +
      " into the device type, in watts as a meter shows them, profile it where pipeedge profile can measure "
      "energy, or leave it out of --hosts");
}

// Without --data-host, nothing is counted for the data rank. A run counts it, on the host of rank 0: says which plan
// it would take if that is another one than `here`, in the time that is left of the limit, if that is enough to tell.
void say_plan_of_run(const CommandLine& line, const Messages& messages, const Answer& here) {
  if (!line.problem.empty() || line.format != Format::kYaml || !line.request.data_host.empty() || here.given) return;
  if (here.solution.status != Status::kOptimal || here.solution.elapsed_s >= line.solver.time_limit_s) return;
  CommandLine of_run = line;
  of_run.solver.time_limit_s -= here.solution.elapsed_s;
  try {
    of_run.request.data_host =
        line.request.hosts.empty() ? first_host(read_files(line).devices) : line.request.hosts.front();
    NamedProblem named = read_request(of_run);
    apply_options(named, of_run);
    const Answer there = plan_only(std::move(named), of_run);
    const Status status = there.solution.status;
    if (status == Status::kUnknown || status == Status::kBounded) return;
    const std::string schedule = schedule_yaml(there);
    if (there.found() && schedule == schedule_yaml(here)) return;
    const std::string host = yaml::printable(of_run.request.data_host);
    messages.say("a run with its data on " + host +
                 (there.found() ? " takes another plan (" + throughput_text(there) + "): " + in_one_line(schedule)
                                : std::string(" has no feasible plan")) +
                 "; see --data-host " + host);
  } catch (const yaml::SpecError&) {
    // The files do not have that host, so a run does not count its links either.
  }
}

// "; with 8 streams, a context of 512 fits": how far the request of a decoder would have to be reduced.
std::string what_fits(const CommandLine& line, const Answer& answer) {
  if (!answer.named.texts || !answer.why || !answer.why->of_memory()) return "";
  // A problem is what it is, and standard input can be read once.
  if (!line.problem.empty() || !line.conditions.empty()) return "";
  CommandLine smaller = line;
  smaller.solver.objective = Objective::kThroughput;
  smaller.solver.time_limit_s = std::min(line.solver.time_limit_s, 1.0);
  yaml::Texts& texts = smaller.request.texts;
  const auto fits = [&](double streams, double context) {
    texts = yaml::Texts{};
    texts.streams = streams;
    texts.context = context;
    NamedProblem named = read_request(smaller);
    apply_options(named, smaller);
    return plan_only(std::move(named), smaller).found();
  };
  // The largest of 1 to `most` units that fits; 0 if none does.
  const auto largest = [](double most, auto each) {
    double enough = 0;
    for (double beyond = most; beyond - enough > 1;) {
      const double middle = std::floor((enough + beyond) / 2);
      (each(middle) ? enough : beyond) = middle;
    }
    return enough;
  };
  constexpr double kPage = 32;
  const yaml::Texts& asked = *answer.named.texts;
  const double pages =
      largest(std::ceil(asked.context / kPage), [&](double count) { return fits(asked.streams, count * kPage); });
  const double streams = largest(asked.streams, [&](double count) { return fits(count, asked.context); });
  if (pages == 0 && streams == 0) return "; not even a text of 32 tokens fits";
  std::string text;
  if (pages > 0) {
    text += "; with --streams " + yaml::number_text(asked.streams) + ", the longest context that fits is " +
            yaml::number_text(pages * kPage);
  }
  if (streams > 0) {
    text += "; with --context " + yaml::number_text(asked.context) + ", at most " +
            yaml::plural(static_cast<std::size_t>(streams), "stream") + (streams == 1 ? " fits" : " fit");
  }
  return text;
}

// The head of a decoder is on the data host: says so if another host were a better one.
void say_best_data_host(const CommandLine& line, const Messages& messages, const Answer& here) {
  if (!here.named.texts || !line.problem.empty() || !line.conditions.empty()) return;
  if (here.given || here.solution.status != Status::kOptimal) return;
  CommandLine other = line;
  std::string best;
  double value = here.solution.objective;
  const Problem& problem = here.named.problem;
  std::set<std::pair<std::string, bool>> tried;
  for (int host = 0; host < problem.host_count(); ++host) {
    const DeviceType* const type = problem.settings.front().type(host);
    const bool linked = std::any_of(problem.links.begin(), problem.links.end(),
                                    [&](const Link& link) { return link.from == host || link.to == host; });
    if (host == problem.data_host || type == nullptr) continue;
    if (!linked && !tried.emplace(type->name, linked).second) continue;
    other.request.data_host = problem.hosts[static_cast<std::size_t>(host)];
    NamedProblem named = read_request(other);
    apply_options(named, other);
    const Answer there = plan_only(std::move(named), other);
    if (there.solution.status != Status::kOptimal || there.solution.objective >= value * (1 - 1e-6)) continue;
    value = there.solution.objective;
    best = other.request.data_host;
  }
  if (best.empty()) return;
  const bool alone = line.solver.objective == Objective::kLatency;
  messages.say("with its data on " + yaml::printable(best) + ", which is a better place for the head, a run would " +
               (alone ? "take " + seconds_text(value) + " a token" : "have " + figure_text(1 / value) + " tokens/s") +
               "; see --data-host " + yaml::printable(best));
}

// Prints what was found out for one plan.
int say(const Answer& answer, const CommandLine& line, const Messages& messages) {
  const bool accepted = answer.found() && answer.fatal() == nullptr;
  if (accepted && line.format == Format::kYaml) print(schedule_yaml(answer));
  if (answer.found() && line.explain) std::fputs(explanation(answer, room_on_standard_error()).c_str(), stderr);
  if (answer.found() && line.losses) std::fputs(losses_text(answer).c_str(), stderr);
  // A plan that follows another one may be less than the best, to keep the order of its hosts.
  const bool may_be_less = answer.before.known() && answer.solution.elapsed_s < line.solver.time_limit_s;
  if (answer.found() && answer.solution.status != Status::kOptimal && !may_be_less) messages.say(stopped_line(answer));
  for (const WhatIf& one : answer.what_ifs) messages.say(what_if_line(answer, one));
  if (accepted) {
    if (line.format == Format::kJson) print(report_json(answer));
    answer.named.texts ? say_best_data_host(line, messages, answer) : say_plan_of_run(line, messages, answer);
    return kDone;
  }
  if (line.format == Format::kJson && !line.problem.empty()) print(no_schedule_json(answer));
  messages.say("error: " + refusal(answer) + what_fits(line, answer));
  return kInfeasible;
}

int run(const CommandLine& line, const Messages& messages) {
  NamedProblem named = read_request(line);
  if (line.format == Format::kProblem) {
    print(problem_json(named));
    return kDone;
  }
  if (line.format == Format::kBids) {
    print(bids_json(named.problem));
    return kDone;
  }
  for (const std::string& warning : named.warnings) messages.say("warning: " + warning);
  apply_options(named, line);
  if (!line.evaluate.empty()) return say(evaluate_plan(named, read_plan(line.evaluate), line), line, messages);
  if (!named.plans.empty()) {
    print(reports_json(evaluate_plans(named, line)));
    return kDone;
  }
  if (line.solver.objective == Objective::kEnergy && named.problem.returns()) {
    throw UsageError("--objective energy: texts are planned for throughput or latency");
  }
  if (line.solver.objective == Objective::kEnergy) require_watts(named.problem, line.problem.empty());
  return say(plan(std::move(named), line), line, messages);
}

int main_with_faults(const std::vector<std::string>& arguments, const Messages& messages) {
  const CommandLine line = parse_command_line(arguments);
  switch (line.action) {
    case Action::kHelp:
    case Action::kHelpAll: print(help_text(messages.program(), line.action == Action::kHelpAll)); return kDone;
    case Action::kVersion: print("sched-pipeline (PipeEdge) " PIPEEDGE_VERSION "\n"); return kDone;
    case Action::kSchedule: break;
  }
  if (line.format != Format::kFiles) return run(line, messages);
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
