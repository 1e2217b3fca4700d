#include "options.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <set>
#include <utility>

#include "../yaml/wording.hpp"
#include "option_table.hpp"

namespace pipeedge::cli {
namespace {

Change added_hosts(const std::string& name, const std::string& value) {
  const auto [type, number] = pair_of(name, value, '=', "TYPE=N");
  const auto count = static_cast<int>(whole_number(name, number, 1, 10'000));
  return {Change::Kind::kAddHost, type, count, 1, name + " " + value};
}

Change removed_host(const std::string& name, const std::string& value) {
  return {Change::Kind::kRemoveHost, nonempty(name, value), 0, 1, name + " " + value};
}

Change scaled_bandwidth(const std::string& name, const std::string& value) {
  return {Change::Kind::kScaleBandwidth, "", 0, positive_number(name, value), name + " " + value};
}

Reader change(Change (*parse)(const std::string&, const std::string&)) {
  return [parse](CommandLine& c, const std::string& n, const std::string& v) { c.changes.push_back(parse(n, v)); };
}

Reader action(Action wanted) {
  return [wanted](CommandLine& c, const std::string&, const std::string&) { c.action = wanted; };
}

yaml::Length length_of(const std::string& name, const std::string& entry) {
  const auto [tokens, count] = pair_of(name, entry, ':', "N:COUNT");
  return {whole_number(name, tokens, 1, 1e9), whole_number(name, count, 1, 1e15)};
}

void add_dtype_of(CommandLine& line, const std::string& name, const std::string& value) {
  const auto [type, dtype] = pair_of(name, value, '=', "TYPE=DTYPE");
  line.request.dtype_of[type] = nonempty(name, dtype);
}

void set_link_bits(CommandLine& line, const std::string& name, const std::string& value) {
  line.auto_link_bits = value == "auto";
  line.link_bits = line.auto_link_bits ? 0 : link_bits(name, value);
}

std::vector<Group> option_groups() {
  using C = CommandLine;
  using R = yaml::Request;
  using T = yaml::Texts;
  return {
      {"Files",
       {
           option({"-sm", "-M", "--models-file"}, "FILE", "models, with the sizes of their layers [models.yml]",
                  into(&C::models_file, nonempty)),
           option({"-sdt", "-T", "--dev-types-file"}, "FILE", "device types and their profiles [device_types.yml]",
                  into(&C::dev_types_file, nonempty)),
           option({"-sd", "-D", "--dev-file"}, "FILE", "hosts of each device type [devices.yml]",
                  into(&C::dev_file, nonempty)),
           option({"--dev-neighbors-file"}, "FILE",
                  "bandwidth and latency of links; a link given in one direction is used for both, and one that is not "
                  "given has the smaller bandwidth of the two device types",
                  into(&C::dev_neighbors_file, nonempty)),
           option({"--cluster-file"}, "FILE",
                  "device types and hosts of a test bed (CLUSTER.yml), in place of -sdt and -sd",
                  into(&C::cluster_file, nonempty)),
           option({"--problem"}, "FILE",
                  "problem as JSON, in place of the files above and the options below; - for standard input",
                  into(&C::problem, nonempty)),
           option({"--conditions"}, "FILE",
                  "slowness of hosts and links, occupied memory, and the data rank's own work, where they differ from "
                  "profiles; the plan that runs, or layers that are loaded; plans whose costs are asked for; - for "
                  "standard input",
                  into(&C::conditions, nonempty)),
           option({"--evaluate"}, "FILE",
                  "schedule whose costs are asked for, in place of the best one; use it with --explain or --format "
                  "json (- for standard input)",
                  into(&C::evaluate, nonempty)),
       }},
      {"Problem",
       {
           option({"-m", "--model", "--model-name"}, "NAME", "model to schedule [google/vit-base-patch16-224]",
                  into(&C::request, &R::model, nonempty)),
           option({"-b", "--batch-size"}, "N", "items in a microbatch, as profiled [8]",
                  into(&C::request, &R::batch_size, whole(1, 1e9))),
           option({"-d", "--dtype"}, "TYPE",
                  "float32, float16, bfloat16, int8 or int4, with or without the prefix \"torch.\" [torch.float32]",
                  into(&C::request, &R::dtype, nonempty)),
           option({"--dtype-of"}, "TYPE=DTYPE",
                  "dtype of one device type, for clusters that mix dtypes (may be repeated); device types without one "
                  "are not used, and links carry the widest dtype",
                  add_dtype_of),
           option({"--streams"}, "N", "texts that a decoder writes at a time [1]",
                  into(&C::request, &R::texts, &T::streams, whole(1, 4096))),
           option({"--context"}, "N", "longest text of a decoder in tokens, which memory is for [the model's]",
                  into(&C::request, &R::texts, &T::context, whole(1, 1e9))),
           option({"--prompt-tokens"}, "N", "tokens of a decoder's prompt [a quarter of --context]",
                  into(&C::request, &R::texts, &T::prompt, whole(1, 1e9))),
           option({"--answer-tokens"}, "N", "tokens of its answer [the rest of --context]",
                  into(&C::request, &R::texts, &T::answer, whole(1, 1e9))),
           option({"--groups"}, "N", "groups in which these texts step [as many as give the most tokens a second]",
                  into(&C::request, &R::texts, &T::groups, positive_number)),
           option({"--tokens"}, "N",
                  "tokens of the longest sentence, for text models; profiles of other lengths are scaled [as profiled]",
                  into(&C::request, &R::tokens, whole(1, 1e9))),
           option({"--lengths"}, "N:COUNT,...",
                  "how many sentences there are of each length, if they differ: times are the averages of microbatches "
                  "as long as their longest sentence [all as the longest]",
                  into(&C::request, &R::lengths, list_of(length_of))),
           option({"--transport"}, "NAME",
                  "transport of the links: p2p, rpc, tcp, or tcp-tls (tcp with a key), whose costs count if profiles "
                  "have them [p2p]",
                  into(&C::request, &R::transport,
                       one_of<std::string>({{"p2p", "p2p"}, {"rpc", "rpc"}, {"tcp", "tcp"}, {"tcp-tls", "tcp-tls"}}))),
           option({"-i", "--buffers-in"}, "N", "microbatches that a stage buffers before computing [2]",
                  into(&C::request, &R::buffers_in, whole(0, 1e6))),
           option({"-o", "--buffers-out"}, "N", "microbatches that a stage buffers for sending [2]",
                  into(&C::request, &R::buffers_out, whole(0, 1e6))),
           option({"--data-host"}, "HOST",
                  "host that reads the inputs and collects the outputs; its links to the first stage and from the last "
                  "one are taken into account",
                  into(&C::request, &R::data_host, nonempty)),
           option({"--input-bytes"}, "N",
                  "bytes of one item of input, on the link from the data host and in memory [parameters_in times the "
                  "bytes of the dtype]",
                  into(&C::request, &R::input_bytes, whole(0, 1e15))),
           option({"--hosts"}, "HOST,...", "hosts to use, from the devices file [all]",
                  into(&C::request, &R::hosts, list_of(nonempty))),
           option({"--link-bits"}, "N|auto",
                  "bits per value on links between stages: 2 to 8, 16, or 0 for uncompressed; auto: for each link the "
                  "most bits that allow the highest throughput [0]",
                  set_link_bits),
       }},
      {"Objective",
       {
           option({"--objective"}, "WHICH",
                  "throughput: make the slowest stage or link as fast as possible; latency: minimise the time of a "
                  "microbatch through the idle pipeline; energy: minimise the joules an item, with a throughput of at "
                  "least --min-throughput [throughput]",
                  both(into(&C::solver, &Options::objective,
                            one_of<Objective>({{"throughput", Objective::kThroughput},
                                               {"latency", Objective::kLatency},
                                               {"energy", Objective::kEnergy}})),
                       into(&C::request, &R::texts, &T::alone,
                            one_of<bool>({{"throughput", false}, {"latency", true}, {"energy", false}})))),
           option({"--max-first-token"}, "SECONDS", "longest time to the first token of a decoder's text [any]",
                  into(&C::request, &R::texts, &T::max_first_token_s, positive_number)),
           option(
               {"--time-limit"}, "SECONDS",
               "stop after this time, with the best schedule so far and a bound on its distance from the optimum [10]",
               into(&C::solver, &Options::time_limit_s, positive_number)),
           option(
               {"--survive-loss"}, nullptr,
               "only a schedule that survives the loss of any one host but the data host: the layers fit on the others",
               flag(&C::survive_loss)),
       }},
      joint_group(),
      {"What if (each prints the new throughput and today's in a line; may be repeated;\n"
       "several are also tried together)",
       {
           option({"--add-host"}, "TYPE=N", "add N hosts of this device type", change(added_hosts)),
           option({"--remove-host"}, "HOST", "remove this host", change(removed_host)),
           option({"--scale-bandwidth"}, "X", "multiply every bandwidth by X", change(scaled_bandwidth)),
       }},
      {"Output",
       {
           option({"--explain"}, nullptr,
                  "print the stages with their costs, the bottleneck, the lower bound, and why hosts are not used",
                  flag(&C::explain)),
           option({"--losses"}, nullptr, "print what the loss of each host would cost, and which loss would end a run",
                  flag(&C::losses)),
           option({"--format"}, "FORM",
                  "yaml: only the schedule; json: the schedule with all that --explain prints; problem: the input of "
                  "--problem, without scheduling; files: the contents of the given files as JSON, without scheduling; "
                  "bids: for each profiled device type, the seconds of each stage that fits, as JSON, without "
                  "scheduling [yaml]",
                  into(&C::format, one_of<Format>({{"yaml", Format::kYaml},
                                                   {"json", Format::kJson},
                                                   {"problem", Format::kProblem},
                                                   {"files", Format::kFiles},
                                                   {"bids", Format::kBids}}))),
           option({"--questions"}, nullptr,
                  "answer one call after another, and read each file only once: a line of standard input is a JSON "
                  "object with arguments and, optionally, the input of a call; the line for it on standard output has "
                  "status, printed and said",
                  action(Action::kQuestions)),
           option({"-h", "--help"}, nullptr, "the options that most people use", action(Action::kHelp)),
           option({"--help-all"}, nullptr, "all options, by section", action(Action::kHelpAll)),
           option({"--version"}, nullptr, "the version", action(Action::kVersion)),
       }},
  };
}

// Last names of the options that are allowed with --problem.
const std::set<std::string> kWithProblem{
    "--problem",      "--link-bits", "--objective",      "--time-limit",      "--add-host", "--remove-host",
    "--explain",      "--format",    "--help",           "--scale-bandwidth", "--version",  "--losses",
    "--survive-loss", "--plan",      "--min-throughput", "--conditions",      "--evaluate", "--help-all"};

// Last names of the options that are allowed with --format files.
const std::set<std::string> kWithFiles{"--models-file",  "--dev-types-file", "--dev-file", "--dev-neighbors-file",
                                       "--cluster-file", "--format",         "--help",     "--help-all",
                                       "--version"};

// Last names of the options that most people use.
const std::set<std::string> kUsual{"--models-file", "--dev-types-file", "--dev-file",  "--dev-neighbors-file",
                                   "--model-name",  "--batch-size",     "--dtype",     "--streams",
                                   "--context",     "--data-host",      "--objective", "--plan",
                                   "--explain",     "--format",         "--help",      "--help-all"};

struct Match {
  const Option* option = nullptr;
  std::string name;        // name for messages
  bool has_value = false;  // attached: --name=value, -nvalue
  std::string value;
};

// Finds the option that `argument` names. A long name may be abbreviated if it is unique; a value may be
// attached with '=' or, after a one-letter name, directly.
Match match(const std::vector<Group>& groups, const std::string& argument) {
  const std::size_t equals = argument.find('=');
  const std::string head = argument.substr(0, equals);
  std::vector<std::string> long_names;
  std::vector<Match> beginnings;
  Match attached;
  for (const Group& group : groups) {
    for (const Option& option : group.options) {
      for (const std::string name : option.names) {
        Match found{&option, name, equals != std::string::npos,
                    equals != std::string::npos ? argument.substr(equals + 1) : ""};
        if (head == name) return found;
        if (name.compare(0, 2, "--") == 0) {
          long_names.push_back(name);
          if (head.size() > 2 && name.compare(0, head.size(), head) == 0) beginnings.push_back(found);
        } else if (name.size() == 2 && option.value != nullptr && argument.compare(0, 2, name) == 0) {
          attached = {&option, name, true, argument.substr(2)};
        }
      }
    }
  }
  if (beginnings.size() == 1) return beginnings.front();
  if (beginnings.size() > 1) {
    std::vector<std::string> names;
    for (const Match& one : beginnings) names.push_back(one.name);
    throw UsageError("the option " + yaml::printable(head) + " is ambiguous: " + yaml::listing(names));
  }
  if (attached.option != nullptr) return attached;
  const std::string near = yaml::nearest(head, long_names);
  throw UsageError("unknown option " + yaml::printable(head) + "; " +
                   (near.empty() ? "--help lists them" : "did you mean " + near + "?"));
}

bool names_an_option(const std::vector<Group>& groups, const std::string& argument) {
  for (const Group& group : groups) {
    for (const Option& option : group.options) {
      for (const std::string name : option.names) {
        if (argument == name) return true;
      }
    }
  }
  return false;
}

// An option with its explanation, in lines.
std::string explained(const Option& option) {
  constexpr std::size_t kColumn = 26;  // column at which the explanations begin
  std::string text = "  ";
  for (const char* name : option.names) text += (text.size() > 2 ? ", " : "") + std::string(name);
  if (option.value != nullptr) text += std::string(" ") + option.value;
  text.resize(std::max(text.size(), kColumn - 2), ' ');
  text += text.size() > kColumn - 2 ? "\n" + std::string(kColumn, ' ') : "  ";
  return text + wrapped(option.help, kColumn) + "\n";
}

}  // namespace

CommandLine parse_command_line(const std::vector<std::string>& arguments) {
  const std::vector<Group> groups = option_groups();
  CommandLine line;
  std::vector<std::string> given;
  std::string described;   // the first option that a problem contains already
  std::string scheduling;  // the first option that has no effect with --format files
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.size() < 2 || argument[0] != '-' || argument == "--") {
      throw UsageError("unexpected argument '" + yaml::printable(argument) + "'; --help lists the options");
    }
    Match found = match(groups, argument);
    if (found.option->value == nullptr) {
      if (found.has_value) throw UsageError("the option " + found.name + " takes no value");
    } else if (!found.has_value) {
      if (i + 1 == arguments.size() || names_an_option(groups, arguments[i + 1])) {
        throw UsageError("the option " + found.name + " needs a value: " + found.name + " " + found.option->value);
      }
      found.value = arguments[++i];
    }
    found.option->read(line, found.name, found.value);
    const std::string name = found.option->names.back();
    given.push_back(name);
    if (described.empty() && kWithProblem.count(name) == 0) described = found.name;
    if (scheduling.empty() && kWithFiles.count(name) == 0) scheduling = found.name;
    if (line.action != Action::kSchedule && line.action != Action::kQuestions) return line;
  }
  if (line.action == Action::kQuestions) {
    if (given.size() > 1) throw UsageError("--questions: each question brings its own arguments; leave out the others");
    return line;
  }
  check_joint(line, given);
  if (line.joint) line.request.choice = line.choice;
  line.request.losses = line.losses;
  for (const yaml::Length& length : line.request.lengths) {
    line.request.tokens = std::max(line.request.tokens, length.tokens);
  }
  if (line.format == Format::kFiles) {
    if (!scheduling.empty()) {
      throw UsageError(scheduling + ": --format files prints only the contents of files; leave out " + scheduling);
    }
    if (line.names_no_file()) throw UsageError("--format files: give the files to print, such as -sd devices.yml");
  }
  if (!line.problem.empty() && !described.empty()) {
    throw UsageError(described + " and --problem: the problem specifies it already; leave out " + described);
  }
  if (!line.cluster_file.empty() && !(line.dev_types_file + line.dev_file).empty()) {
    const char* const other = line.dev_file.empty() ? "-sdt" : "-sd";
    throw UsageError(std::string(other) + " and --cluster-file name device types or hosts twice; leave out " + other);
  }
  if (line.format == Format::kBids && (line.joint || !line.request.data_host.empty() || !line.dev_file.empty())) {
    throw UsageError(
        "--format bids: bids are of device types in one number type; leave out --plan auto, -sd and "
        "--data-host");
  }
  if (line.format == Format::kProblem || line.format == Format::kBids) {
    const std::string of_schedule = line.explain           ? "--explain"
                                    : line.losses          ? "--losses"
                                    : line.survive_loss    ? "--survive-loss"
                                    : line.changes.empty() ? ""
                                                           : line.changes.front().text;
    if (!of_schedule.empty()) {
      throw UsageError(of_schedule + ": with --format " + (line.format == Format::kBids ? "bids" : "problem") +
                       " nothing is scheduled; leave one of them out");
    }
  }
  if (!line.evaluate.empty()) {
    const std::string of_search = line.losses            ? "--losses"
                                  : line.survive_loss    ? "--survive-loss"
                                  : line.auto_link_bits  ? "--link-bits auto"
                                  : line.changes.empty() ? ""
                                                         : line.changes.front().text;
    if (!of_search.empty())
      throw UsageError(of_search + " and --evaluate: the schedule is given; leave one of them out");
  }
  if (line.auto_link_bits && line.solver.objective != Objective::kThroughput) {
    throw UsageError(
        "--link-bits auto: fewer bits are always better for latency, and never worse for energy; give a "
        "number, or --plan auto with --batch-sizes and --dtypes, which limits what they lose");
  }
  if ((line.problem == "-") + (line.conditions == "-") + (line.evaluate == "-") > 1) {
    throw UsageError("--problem, --conditions and --evaluate: only one of them can be standard input");
  }
  return line;
}

std::string help_text(const std::string& program, bool all) {
  std::string text = "Usage: " + program +
                     " [OPTION]...\n"
                     "\n"
                     "Cut a model into pipeline stages, at most one per host, with the highest\n"
                     "throughput. The schedule is printed to standard output as YAML, in stage order,\n"
                     "with layers counted from 1; everything else goes to standard error.\n";
  if (!all) text += "\nOptions that most people use\n";
  for (const Group& group : option_groups()) {
    if (all) text += "\n" + std::string(group.title) + "\n";
    for (const Option& option : group.options) {
      if (all || kUsual.count(option.names.back()) > 0) text += explained(option);
    }
  }
  if (all) {
    text +=
        "\n"
        "Exit status: 0 done; 2 invalid options or files; 3 no feasible schedule;\n"
        "1 internal error. A line on standard error gives the reason.\n";
  }
  text += "\nExamples\n";
  for (const char* arguments :
       {"-m google/vit-large-patch16-224 --explain", "-sm m.yml -sdt types.yml -sd devices.yml > schedule.yml",
        "--add-host Minnowboard-E3845=2 --scale-bandwidth 0.1"}) {
    text += "  " + program + " " + arguments + "\n";
  }
  if (!all) text += "\n'" + program + " --help-all' shows all options, by section.\n";
  return text;
}

}  // namespace pipeedge::cli
