// sched-pipeline: reads options and files, and prints a schedule, or the contents of the files. Makes no decisions
// itself.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <exception>
#include <filesystem>
#include <iostream>
#include <map>
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
#include "console.hpp"
#include "files_json.hpp"
#include "options.hpp"
#include "problem_json.hpp"
#include "questions.hpp"
#include "report.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

enum ExitCode { kDone = 0, kFault = 1, kWrongRequest = 2, kInfeasible = 3 };

// The files of a request.
struct RequestFiles {
  yaml::Models models;
  yaml::DeviceTypes types;
  yaml::Devices devices;
  std::optional<yaml::Neighbors> neighbors;

  const yaml::Neighbors* known_links() const { return neighbors ? &*neighbors : nullptr; }
};

// A caller of the program: its console, and the files that its requests have named, as they were then.
struct Caller {
  Console& console;
  std::map<std::vector<std::string>, RequestFiles>& files;
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

const RequestFiles& files_of(const CommandLine& line, const Caller& caller) {
  const std::vector<std::string> names{line.models_file,        line.dev_types_file,
                                       line.dev_file,           line.cluster_file,
                                       line.dev_neighbors_file, line.format == Format::kBids ? "bids" : ""};
  const auto known = caller.files.find(names);
  return known != caller.files.end() ? known->second : caller.files.emplace(names, read_files(line)).first->second;
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

NamedProblem read_request(const CommandLine& line, const Caller& caller) {
  NamedProblem named;
  if (line.problem.empty()) {
    const RequestFiles& files = files_of(line, caller);
    yaml::Assembly assembly =
        yaml::assemble(files.models, files.types, files.devices, files.known_links(), line.request);
    named.model = line.request.model;
    named.dtype = std::string(yaml::short_dtype(line.request.dtype));
    named.problem = std::move(assembly.problem);
    named.left_out = std::move(assembly.left_out);
    named.warnings = std::move(assembly.warnings);
    named.texts = assembly.texts;
  } else {
    named = read_problem(line.problem, caller.console);
  }
  named.joint = named.joint || line.joint;
  validate(named.problem);
  return named;
}

// The problem under the conditions of a file, and with the widths that were asked for.
void apply_options(NamedProblem& named, const CommandLine& line, const Caller& caller) {
  if (!line.conditions.empty()) apply_conditions(named, line.conditions, caller.console);
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
void say_plan_of_run(const CommandLine& line, const Caller& caller, const Answer& here) {
  if (!line.problem.empty() || line.format != Format::kYaml || !line.request.data_host.empty() || here.given) return;
  if (here.solution.status != Status::kOptimal || here.solution.elapsed_s >= line.solver.time_limit_s) return;
  CommandLine of_run = line;
  of_run.solver.time_limit_s -= here.solution.elapsed_s;
  try {
    of_run.request.data_host =
        line.request.hosts.empty() ? first_host(files_of(line, caller).devices) : line.request.hosts.front();
    NamedProblem named = read_request(of_run, caller);
    apply_options(named, of_run, caller);
    const Answer there = plan_only(std::move(named), of_run);
    const Status status = there.solution.status;
    if (status == Status::kUnknown || status == Status::kBounded) return;
    const std::string schedule = schedule_yaml(there);
    if (there.found() && schedule == schedule_yaml(here)) return;
    const std::string host = yaml::printable(of_run.request.data_host);
    caller.console.say("a run with its data on " + host +
                       (there.found() ? " takes another plan (" + throughput_text(there) + "): " + in_one_line(schedule)
                                      : std::string(" has no feasible plan")) +
                       "; see --data-host " + host);
  } catch (const yaml::SpecError&) {
    // The files do not have that host, so a run does not count its links either.
  }
}

// "; with 8 streams, a context of 512 fits": how far the request of a decoder would have to be reduced.
std::string what_fits(const CommandLine& line, const Caller& caller, const Answer& answer) {
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
    NamedProblem named = read_request(smaller, caller);
    apply_options(named, smaller, caller);
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
void say_best_data_host(const CommandLine& line, const Caller& caller, const Answer& here) {
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
    NamedProblem named = read_request(other, caller);
    apply_options(named, other, caller);
    const Answer there = plan_only(std::move(named), other);
    if (there.solution.status != Status::kOptimal || there.solution.objective >= value * (1 - 1e-6)) continue;
    value = there.solution.objective;
    best = other.request.data_host;
  }
  if (best.empty()) return;
  const bool alone = line.solver.objective == Objective::kLatency;
  caller.console.say(
      "with its data on " + yaml::printable(best) + ", which is a better place for the head, a run would " +
      (alone ? "take " + seconds_text(value) + " a token" : "have " + figure_text(1 / value) + " tokens/s") +
      "; see --data-host " + yaml::printable(best));
}

// Prints what was found out for one plan.
int say(const Answer& answer, const CommandLine& line, const Caller& caller) {
  const bool accepted = answer.found() && answer.fatal() == nullptr;
  if (accepted && line.format == Format::kYaml) caller.console.print(schedule_yaml(answer));
  if (answer.found() && line.explain) caller.console.tell(explanation(answer, caller.console.room()));
  if (answer.found() && line.losses) caller.console.tell(losses_text(answer));
  // A plan that follows another one may be less than the best, to keep the order of its hosts.
  const bool may_be_less = answer.before.known() && answer.solution.elapsed_s < line.solver.time_limit_s;
  if (answer.found() && answer.solution.status != Status::kOptimal && !may_be_less) {
    caller.console.say(stopped_line(answer));
  }
  for (const WhatIf& one : answer.what_ifs) caller.console.say(what_if_line(answer, one));
  if (accepted) {
    if (line.format == Format::kJson) caller.console.print(report_json(answer));
    answer.named.texts ? say_best_data_host(line, caller, answer) : say_plan_of_run(line, caller, answer);
    return kDone;
  }
  if (line.format == Format::kJson && !line.problem.empty()) caller.console.print(no_schedule_json(answer));
  caller.console.say("error: " + refusal(answer) + what_fits(line, caller, answer));
  return kInfeasible;
}

int run(const CommandLine& line, const Caller& caller) {
  NamedProblem named = read_request(line, caller);
  if (line.format == Format::kProblem) {
    caller.console.print(problem_json(named));
    return kDone;
  }
  if (line.format == Format::kBids) {
    caller.console.print(bids_json(named.problem));
    return kDone;
  }
  for (const std::string& warning : named.warnings) caller.console.say("warning: " + warning);
  apply_options(named, line, caller);
  if (!line.evaluate.empty()) {
    return say(evaluate_plan(named, read_plan(line.evaluate, caller.console), line), line, caller);
  }
  if (!named.plans.empty()) {
    caller.console.print(reports_json(evaluate_plans(named, line)));
    return kDone;
  }
  if (line.solver.objective == Objective::kEnergy && named.problem.returns()) {
    throw UsageError("--objective energy: texts are planned for throughput or latency");
  }
  if (line.solver.objective == Objective::kEnergy) require_watts(named.problem, line.problem.empty());
  return say(plan(std::move(named), line), line, caller);
}

// Returns the exit status of `work`, after saying what went wrong.
template <typename Work>
int guarded(Console& console, Work work) {
  const auto failed = [&](const std::string& what, int status) {
    console.say("error: " + what);
    return status;
  };
  try {
    return work();
  } catch (const UsageError& error) {
    return failed(error.what(), kWrongRequest);
  } catch (const yaml::SpecError& error) {
    return failed(error.what(), kWrongRequest);
  } catch (const std::bad_alloc&) {
    return failed("out of memory", kFault);
  } catch (const std::exception& error) {
    return failed(error.what(), kFault);
  }
}

int answer(const CommandLine& line, const Caller& caller) {
  switch (line.action) {
    case Action::kHelp:
    case Action::kHelpAll:
      caller.console.print(help_text(caller.console.called(), line.action == Action::kHelpAll));
      return kDone;
    case Action::kVersion: caller.console.print("sched-pipeline (PipeEdge) " PIPEEDGE_VERSION "\n"); return kDone;
    case Action::kQuestions: throw UsageError("--questions: a question cannot hold others");
    case Action::kSchedule: break;
  }
  if (line.format != Format::kFiles) return run(line, caller);
  caller.console.print(files_json(read_given_files(line)));
  return kDone;
}

// Answers questions until standard input ends.
int answer_questions(const Caller& caller) {
  for (std::string question; std::getline(std::cin, question);) {
    QuestionConsole console(caller.console.called());
    const int status = guarded(console, [&] {
      return answer(parse_command_line(console.ask(question)), {console, caller.files});
    });
    caller.console.print(console.answer(status));
  }
  return kDone;
}

int main_with_faults(const std::vector<std::string>& arguments, const Caller& caller) {
  const CommandLine line = parse_command_line(arguments);
  return line.action == Action::kQuestions ? answer_questions(caller) : answer(line, caller);
}

}  // namespace
}  // namespace pipeedge::cli

int main(int argc, char** argv) {
  using namespace pipeedge;
  cli::StandardConsole console(argc > 0 ? argv[0] : "");
#ifdef SIGPIPE
  std::signal(SIGPIPE, SIG_IGN);  // so that the status is the same as that of the other programs
#endif
  std::map<std::vector<std::string>, cli::RequestFiles> files;
  return cli::guarded(console, [&] {
    return cli::main_with_faults({argv + std::min(argc, 1), argv + argc}, {console, files});
  });
}
