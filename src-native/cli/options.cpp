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
  const std::size_t equals = value.rfind('=');
  if (equals == std::string::npos || equals == 0) {
    throw UsageError(name + ": '" + yaml::printable(value) + "' is not of the form TYPE=N");
  }
  Change change;
  change.kind = Change::Kind::kAddHost;
  change.name = value.substr(0, equals);
  change.count = static_cast<int>(whole_number(name, value.substr(equals + 1), 1, 10'000));
  change.text = name + " " + value;
  return change;
}

Format format_of(const std::string& name, const std::string& value) {
  if (value == "yaml") return Format::kYaml;
  if (value == "json") return Format::kJson;
  if (value == "problem") return Format::kProblem;
  if (value == "files") return Format::kFiles;
  if (value == "bids") return Format::kBids;
  throw UsageError(name + ": '" + yaml::printable(value) + "' is neither yaml, json, problem, files nor bids");
}

std::string transport_of(const std::string& name, const std::string& value) {
  const auto& known = yaml::kTransports;
  if (std::find(known.begin(), known.end(), value) != known.end()) return value;
  throw UsageError(name + ": '" + yaml::printable(value) + "' is not one of p2p, rpc, tcp, tcp-tls");
}

std::vector<Group> option_groups() {
  return {
      {"Files",
       {
           {{"-sm", "-M", "--models-file"},
            "FILE",
            "models, with the sizes of their layers [models.yml]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.models_file = nonempty(n, v); }},
           {{"-sdt", "-T", "--dev-types-file"},
            "FILE",
            "device types and their profiles [device_types.yml]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.dev_types_file = nonempty(n, v); }},
           {{"-sd", "-D", "--dev-file"},
            "FILE",
            "hosts of each device type [devices.yml]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.dev_file = nonempty(n, v); }},
           {{"--dev-neighbors-file"},
            "FILE",
            "bandwidth and latency of links; a link given in one\n"
            "direction is used for both, and one that is not given\n"
            "has the smaller bandwidth of the two device types",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.dev_neighbors_file = nonempty(n, v); }},
           {{"--cluster-file"},
            "FILE",
            "device types and hosts of a test bed (CLUSTER.yml), in\n"
            "place of -sdt and -sd",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.cluster_file = nonempty(n, v); }},
           {{"--problem"},
            "FILE",
            "problem as JSON, in place of the files above and the\n"
            "options below; - for standard input",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.problem = nonempty(n, v); }},
           {{"--conditions"},
            "FILE",
            "slowness of hosts and links, occupied memory, and the\n"
            "data rank's own work, where they differ from profiles;\n"
            "the plan that runs, or layers that are loaded; plans\n"
            "whose costs are asked for; - for standard input",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.conditions = nonempty(n, v); }},
           {{"--evaluate"},
            "FILE",
            "schedule whose costs are asked for, in place of the\n"
            "best one; use it with --explain or --format json\n"
            "(- for standard input)",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.evaluate = nonempty(n, v); }},
       }},
      {"Problem",
       {
           {{"-m", "--model", "--model-name"},
            "NAME",
            "model to schedule [google/vit-base-patch16-224]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.request.model = nonempty(n, v); }},
           {{"-b", "--batch-size"},
            "N",
            "items in a microbatch, as profiled [8]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.batch_size = whole_number(n, v, 1, 1e9);
            }},
           {{"-d", "--dtype"},
            "TYPE",
            "float32, float16, bfloat16, int8 or int4, with or\n"
            "without the prefix \"torch.\" [torch.float32]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.request.dtype = nonempty(n, v); }},
           {{"--dtype-of"},
            "TYPE=DTYPE",
            "dtype of one device type, for clusters that mix dtypes\n"
            "(may be repeated); device types without one are not\n"
            "used, and links carry the widest dtype",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              const std::size_t equals = v.rfind('=');
              if (equals == std::string::npos || equals == 0) {
                throw UsageError(n + ": '" + yaml::printable(v) + "' is not of the form TYPE=DTYPE");
              }
              c.request.dtype_of[v.substr(0, equals)] = nonempty(n, v.substr(equals + 1));
            }},
           {{"--streams"},
            "N",
            "texts that a decoder writes at a time [1]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.texts.streams = whole_number(n, v, 1, 4096);
            }},
           {{"--context"},
            "N",
            "longest text of a decoder in tokens, which memory is\n"
            "for [the model's]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.texts.context = whole_number(n, v, 1, 1e9);
            }},
           {{"--prompt-tokens"},
            "N",
            "tokens of a decoder's prompt [a quarter of --context]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.texts.prompt = whole_number(n, v, 1, 1e9);
            }},
           {{"--answer-tokens"},
            "N",
            "tokens of its answer [the rest of --context]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.texts.answer = whole_number(n, v, 1, 1e9);
            }},
           {{"--tokens"},
            "N",
            "tokens of the longest sentence, for text models;\n"
            "profiles of other lengths are scaled [as profiled]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.tokens = whole_number(n, v, 1, 1e9);
            }},
           {{"--lengths"},
            "N:COUNT,...",
            "how many sentences there are of each length, if they\n"
            "differ: times are the averages of microbatches as long\n"
            "as their longest sentence [all as the longest]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.lengths.clear();
              for (const std::string& entry : names(n, v)) {
                const std::size_t colon = entry.find(':');
                if (colon == std::string::npos) {
                  throw UsageError(n + ": '" + yaml::printable(entry) + "' is not of the form N:COUNT");
                }
                c.request.lengths.push_back({whole_number(n, entry.substr(0, colon), 1, 1e9),
                                             whole_number(n, entry.substr(colon + 1), 1, 1e15)});
              }
            }},
           {{"--transport"},
            "NAME",
            "transport of the links: p2p, rpc, tcp, or tcp-tls (tcp\n"
            "with a key), whose costs count if profiles have them\n"
            "[p2p]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.transport = transport_of(n, v);
            }},
           {{"-i", "--buffers-in"},
            "N",
            "microbatches that a stage buffers before computing [2]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.buffers_in = whole_number(n, v, 0, 1e6);
            }},
           {{"-o", "--buffers-out"},
            "N",
            "microbatches that a stage buffers for sending [2]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.buffers_out = whole_number(n, v, 0, 1e6);
            }},
           {{"--data-host"},
            "HOST",
            "host that reads the inputs and collects the outputs;\n"
            "its links to the first stage and from the last one\n"
            "are taken into account",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.request.data_host = nonempty(n, v); }},
           {{"--input-bytes"},
            "N",
            "bytes of one item of input, on the link from the data\n"
            "host and in memory [parameters_in times the bytes of\n"
            "the dtype]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.input_bytes = whole_number(n, v, 0, 1e15);
            }},
           {{"--hosts"},
            "HOST,...",
            "hosts to use, from the devices file [all]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.request.hosts = names(n, v); }},
           {{"--link-bits"},
            "N|auto",
            "bits per value on links between stages: 2 to 8, 16, or\n"
            "0 for uncompressed; auto: for each link the most bits\n"
            "that allow the highest throughput [0]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.auto_link_bits = v == "auto";
              c.link_bits = c.auto_link_bits ? 0 : link_bits(n, v);
            }},
       }},
      {"Objective",
       {
           {{"--objective"},
            "WHICH",
            "throughput: make the slowest stage or link as fast as\n"
            "possible; latency: minimise the time of a microbatch\n"
            "through the idle pipeline; energy: minimise the\n"
            "joules an item, with a throughput of at\n"
            "least --min-throughput [throughput]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              if (v != "throughput" && v != "latency" && v != "energy") {
                throw UsageError(n + ": '" + yaml::printable(v) + "' is neither throughput, latency nor energy");
              }
              c.request.texts.alone = v == "latency";
              c.solver.objective = v == "latency"  ? Objective::kLatency
                                   : v == "energy" ? Objective::kEnergy
                                                   : Objective::kThroughput;
            }},
           {{"--max-first-token"},
            "SECONDS",
            "longest time to the first token of a decoder's text\n"
            "[any]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.request.texts.max_first_token_s = positive_number(n, v);
            }},
           {{"--time-limit"},
            "SECONDS",
            "stop after this time, with the best schedule so far\n"
            "and a bound on its distance from the optimum [10]",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.solver.time_limit_s = positive_number(n, v);
            }},
           {{"--survive-loss"},
            nullptr,
            "only a schedule that survives the loss of any one host\n"
            "but the data host: the layers fit on the others",
            [](CommandLine& c, const std::string&, const std::string&) { c.survive_loss = true; }},
       }},
      joint_group(),
      {"What if (each prints the new throughput and today's in a line; may be repeated;\n"
       "several are also tried together)",
       {
           {{"--add-host"},
            "TYPE=N",
            "add N hosts of this device type",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.changes.push_back(added_hosts(n, v)); }},
           {{"--remove-host"},
            "HOST",
            "remove this host",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.changes.push_back({Change::Kind::kRemoveHost, nonempty(n, v), 0, 1, n + " " + v});
            }},
           {{"--scale-bandwidth"},
            "X",
            "multiply every bandwidth by X",
            [](CommandLine& c, const std::string& n, const std::string& v) {
              c.changes.push_back({Change::Kind::kScaleBandwidth, "", 0, positive_number(n, v), n + " " + v});
            }},
       }},
      {"Output",
       {
           {{"--explain"},
            nullptr,
            "print the stages with their costs, the bottleneck, the\n"
            "lower bound, and why hosts are not used",
            [](CommandLine& c, const std::string&, const std::string&) { c.explain = true; }},
           {{"--losses"},
            nullptr,
            "print what the loss of each host would cost, and which\n"
            "loss would end a run",
            [](CommandLine& c, const std::string&, const std::string&) { c.losses = true; }},
           {{"--format"},
            "FORM",
            "yaml: only the schedule; json: the schedule with all\n"
            "that --explain prints; problem: the input of\n"
            "--problem, without scheduling; files: the contents of\n"
            "the given files as JSON, without scheduling; bids: for\n"
            "each profiled device type, the seconds of each stage\n"
            "that fits, as JSON, without scheduling [yaml]",
            [](CommandLine& c, const std::string& n, const std::string& v) { c.format = format_of(n, v); }},
           {{"-h", "--help"},
            nullptr,
            "this text",
            [](CommandLine& c, const std::string&, const std::string&) { c.action = Action::kHelp; }},
           {{"--version"},
            nullptr,
            "the version",
            [](CommandLine& c, const std::string&, const std::string&) { c.action = Action::kVersion; }},
       }},
  };
}

// Last names of the options that are allowed with --problem.
const std::set<std::string> kWithProblem{
    "--problem",      "--link-bits", "--objective",      "--time-limit",      "--add-host", "--remove-host",
    "--explain",      "--format",    "--help",           "--scale-bandwidth", "--version",  "--losses",
    "--survive-loss", "--plan",      "--min-throughput", "--conditions",      "--evaluate"};

// Last names of the options that are allowed with --format files.
const std::set<std::string> kWithFiles{"--models-file",  "--dev-types-file", "--dev-file", "--dev-neighbors-file",
                                       "--cluster-file", "--format",         "--help",     "--version"};

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
    if (line.action != Action::kSchedule) return line;
  }
  check_joint(line, given);
  if (line.joint) line.request.choice = line.choice;
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

std::string help_text(const std::string& program) {
  constexpr std::size_t kColumn = 26;  // column at which the explanations begin
  std::string text = "Usage: " + program +
                     " [OPTION]...\n"
                     "\n"
                     "Cut a model into pipeline stages, at most one per host, with the highest\n"
                     "throughput. The schedule is printed to standard output as YAML, in stage order,\n"
                     "with layers counted from 1; everything else goes to standard error.\n";
  for (const Group& group : option_groups()) {
    text += "\n" + std::string(group.title) + "\n";
    for (const Option& option : group.options) {
      std::string left = "  ";
      for (const char* name : option.names) left += (left.size() > 2 ? ", " : "") + std::string(name);
      if (option.value != nullptr) left += std::string(" ") + option.value;
      left.resize(std::max(left.size(), kColumn - 2), ' ');
      text += left + (left.size() > kColumn - 2 ? "\n" + std::string(kColumn, ' ') : "  ");
      for (const char* c = option.help; *c != '\0'; ++c) {
        text += *c;
        if (*c == '\n') text.append(kColumn, ' ');
      }
      text += "\n";
    }
  }
  text +=
      "\n"
      "Exit status: 0 done; 2 invalid options or files; 3 no feasible schedule;\n"
      "1 internal error. A line on standard error gives the reason.\n"
      "\n"
      "Examples\n";
  for (const char* arguments :
       {"-m google/vit-large-patch16-224 --explain", "-sm m.yml -sdt types.yml -sd devices.yml > schedule.yml",
        "--add-host Minnowboard-E3845=2 --scale-bandwidth 0.1"}) {
    text += "  " + program + " " + arguments + "\n";
  }
  return text;
}

}  // namespace pipeedge::cli
