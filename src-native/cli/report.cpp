#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "../yaml/wording.hpp"
#include "text.hpp"

namespace pipeedge::cli {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

const Problem& problem_of(const Answer& answer) { return answer.named.problem; }

const std::string& host_name(const Answer& answer, int host) { return problem_of(answer).hosts[at(host)]; }

const Setting& setting_of(const Answer& answer, const Stage& stage) {
  return problem_of(answer).setting(stage.setting);
}

const DeviceType& type_of(const Answer& answer, const Stage& stage) {
  return *setting_of(answer, stage).type(stage.host);
}

// The device type of a host, in the first setting that has it.
const std::string& type_name(const Answer& answer, int host) {
  for (const Setting& setting : problem_of(answer).settings) {
    if (const DeviceType* type = setting.type(host)) return type->name;
  }
  return host_name(answer, host);
}

// The number type of a stage.
const std::string& dtype_of(const Answer& answer, const Stage& stage) {
  const std::string& own = type_of(answer, stage).notes.dtype;
  return own.empty() ? setting_of(answer, stage).dtype : own;
}

bool is_last(const Answer& answer, std::size_t stage) { return stage + 1 == answer.solution.stages.size(); }

// Bits per value on the link that leaves a stage; 0: uncompressed.
int bits_behind(const Answer& answer, std::size_t stage) {
  const Stage& own = answer.solution.stages[stage];
  const int bits = is_last(answer, stage) ? 0 : problem_of(answer).widths[at(own.width)].bits;
  return bits < 8 * setting_of(answer, own).element_bytes ? bits : 0;
}

const char* objective_name(const Answer& answer) {
  switch (answer.options.objective) {
    case Objective::kLatency: return "latency";
    case Objective::kEnergy: return "energy";
    case Objective::kThroughput: break;
  }
  return "throughput";
}

// Items a second; those of a decoder are tokens.
std::string rate_words(const Answer& answer, double items_per_s) {
  return answer.named.texts ? figure_text(items_per_s) + " tokens/s" : rate_text(items_per_s);
}

// What a plan means for the texts of a decoder.
struct TextFigures {
  double groups = 1;        // in which the streams step
  double tokens_per_s = 0;  // of all streams
  double token_s = 0;       // of a lone stream
  double first_token_s = 0;
  double chunk = 0;    // tokens of a prompt that a step computes
  double waiting = 1;  // how many times as long a step takes, as groups wait for each other's slow ones
};

TextFigures text_figures(const Answer& answer) {
  const double streams = answer.named.texts->streams;
  const Problem& problem = problem_of(answer);
  TextFigures found;
  const std::vector<Stage>& stages = answer.solution.stages;
  const Aside& prompt = problem.prompts[std::min(stages.size(), problem.prompts.size()) - 1];
  found.first_token_s = aside_cost(problem, LinkTable(problem), stages, prompt, 0, problem.layers()).total_s;
  found.chunk = std::ceil(prompt.settings.front().batch_size);
  if (problem.either.empty()) {
    found.groups = streams / answer.solution.batch_size;
    found.tokens_per_s = answer.solution.items_per_s();
    found.token_s = answer.costs.asides.front().total_s;
    if (found.tokens_per_s < streams / loosened(answer.costs.latency_s)) {
      found.waiting = problem.setting(stages.front().setting).waiting;
    }
    return found;
  }
  found.token_s = answer.solution.latency_s;
  for (std::size_t g = 0; g < problem.either.size(); ++g) {
    const AsideCost& cost = answer.costs.either[g];
    const double rows = problem.either[g].settings.front().batch_size;
    const double waiting = problem.either[g].settings.front().waiting;
    const double rate = std::min(rows / (cost.longest_s * waiting), streams / cost.latency_s);
    if (rate <= loosened(found.tokens_per_s)) continue;
    found.tokens_per_s = rate;
    found.waiting = rate < streams / loosened(cost.latency_s) ? waiting : 1;
    found.groups = streams / rows;
  }
  return found;
}

bool by_energy(const Answer& answer) { return answer.options.objective == Objective::kEnergy; }

// A value of the objective. Where the plan does not choose the microbatch size, seconds are those of a microbatch.
double reported(const Answer& answer, double value, const Solution& solution) {
  const bool an_item = answer.named.joint || answer.options.objective != Objective::kThroughput;
  return an_item ? value : value == solution.objective ? solution.period_s : value * solution.batch_size;
}

std::string objective_text(const Answer& answer, double objective) {
  switch (answer.options.objective) {
    case Objective::kLatency: return "latency " + seconds_text(objective);
    case Objective::kEnergy: return energy_text(objective);
    case Objective::kThroughput: break;
  }
  return rate_words(answer, 1 / objective);
}

std::string bound_text(const Answer& answer) {
  const double bound = reported(answer, answer.solution.lower_bound, answer.solution);
  if (by_energy(answer)) return energy_text(bound);
  return seconds_text(bound) + (answer.options.objective == Objective::kLatency ? " on the latency"
                                : answer.named.joint                            ? " an item"
                                                                                : " on the bottleneck");
}

std::string quality_text(const Solution& solution) {
  if (solution.status == Status::kOptimal) return "proven optimal";
  return "at most " + percent_text(solution.gap()) + " from the optimum";
}

std::string ratio_text(double ratio) {
  return std::isfinite(ratio) ? std::string(" (") + (ratio >= 1 ? "+" : "") + percent_text(ratio - 1) + ")" : "";
}

std::string agreement_text(const Answer& answer, double loss) {
  return answer.named.losses_known() ? figure_text(std::max(0.0, 1 - loss)) : "unknown";
}

// How many times as long the period is as the longest stage or link.
double waiting_of(const Answer& answer) {
  return problem_of(answer).setting(answer.solution.stages.front().setting).waiting;
}

// The stage or link that determines the period. Stages count from 0.
struct Bottleneck {
  static constexpr int kDataHost = -1;

  const char* kind = "compute";
  int stage = 0;  // stage that computes or sends; kDataHost for the inputs and for "data"
  int to = 0;     // for a link, stage that receives; kDataHost for the outputs
  double seconds = -1;
};

Bottleneck find_bottleneck(const Answer& answer) {
  Bottleneck worst;
  const auto consider = [&](const char* kind, int stage, int to, double seconds) {
    if (seconds > worst.seconds) worst = {kind, stage, to, seconds};
  };
  const std::vector<StageCost>& costs = answer.costs.stages;
  const int last = static_cast<int>(costs.size()) - 1;
  for (int s = 0; s <= last; ++s) consider("compute", s, s, costs[at(s)].busy_s());
  consider("link", Bottleneck::kDataHost, 0, costs.front().link_in_s);
  for (int s = 0; s <= last; ++s) {
    consider("link", s, s < last ? s + 1 : Bottleneck::kDataHost, costs[at(s)].link_out_s);
  }
  consider("data", Bottleneck::kDataHost, Bottleneck::kDataHost,
           std::max(answer.costs.feeding_s, answer.costs.collecting_s));
  const double longest_s = worst.seconds * waiting_of(answer);
  if (answer.solution.period_s > loosened(longest_s)) consider("latency", 0, 0, answer.solution.period_s);
  return worst;
}

std::string stage_text(const Answer& answer, int stage) {
  if (stage == Bottleneck::kDataHost) {
    return "the data host " + yaml::printable(host_name(answer, problem_of(answer).data_host));
  }
  return "stage " + std::to_string(stage) + " on " +
         yaml::printable(host_name(answer, answer.solution.stages[at(stage)].host));
}

std::string bottleneck_words(const Answer& answer) {
  const Bottleneck worst = find_bottleneck(answer);
  const std::string from = stage_text(answer, worst.stage);
  const std::string seconds = seconds_text(worst.seconds);
  if (worst.kind == std::string("link")) {
    return "the link from " + from + " to " + stage_text(answer, worst.to) + " takes " + seconds;
  }
  if (worst.kind == std::string("latency")) {
    return "a step takes " + seconds_text(answer.solution.latency_s) +
           " through all stages and back, and no stage is busy all of that time";
  }
  if (worst.kind == std::string("data")) {
    const bool feeds = answer.costs.feeding_s >= answer.costs.collecting_s;
    return from + (feeds ? " reads the input in " : " collects the results in ") + seconds;
  }
  const double beside = answer.costs.stages[at(worst.stage)].data_s;
  return from + " computes " + seconds +
         (beside > 0 ? ", of which reading and collecting take " + seconds_text(beside) : "");
}

std::string hosts_text(std::size_t count) { return yaml::plural(count, "host"); }

// Why there is no plan for so many hosts.
std::string why_text(const Answer& answer, const WhyNone& why, std::size_t hosts) {
  using Kind = WhyNone::Kind;
  const std::string layer = std::to_string(why.layer + 1);
  switch (why.kind) {
    case Kind::kNoHost: return "no host is left";
    case Kind::kBids:
      return "no chain of stages that hosts bid for, each on its own host, covers all layers over links that carry "
             "them";
    case Kind::kLayer:
      return "layer " + layer + " fits on no host: it needs " + megabytes_text(why.needed_bytes) +
             " MB with its buffers, the largest host has " + megabytes_text(why.free_bytes) + " MB";
    case Kind::kMemory:
      return megabytes_text(why.needed_bytes - why.free_bytes) + " MB of memory are missing: the layers need " +
             megabytes_text(why.needed_bytes) + " MB without buffers, " + hosts_text(hosts) + " together have " +
             megabytes_text(why.free_bytes) + " MB";
    case Kind::kLinks: return "the memory is enough, but no links with bandwidth join the hosts it takes";
    case Kind::kBuffers:
      return "about " + megabytes_text(why.free_bytes * (why.factor - 1)) +
             " MB of memory are missing: cut into stages with their buffers, the layers fit when each host has " +
             percent_text(why.factor - 1) + " more than now (" + megabytes_text(why.free_bytes) + " MB on " +
             hosts_text(hosts) + ")";
    case Kind::kCut: return "no cut of the layers fits the hosts";
    case Kind::kThroughput:
      return "none has a throughput of " + rate_words(answer, answer.options.min_items_per_s) + "; the fastest has " +
             rate_words(answer, why.items_per_s) + ": lower --min-throughput";
    case Kind::kLoss:
      return "none has an agreement of " + figure_text(1 - problem_of(answer).max_loss) +
             "; lower --min-agreement, or profile more number types and bits";
    case Kind::kAside: return "none keeps --max-latency, --max-first-token and --min-throughput; relax them";
    case Kind::kLatency:
      return "none has a latency of at most " + seconds_text(problem_of(answer).max_latency_s) + "; one of " +
             seconds_text(why.latency_s) + " exists";
  }
  return "";
}

std::string undecided_text() { return "none was found within the time limit"; }

// Why the plan does not use a host.
std::string why_text(const Answer& answer, const WhyUnused& why) {
  using Kind = WhyUnused::Kind;
  const std::string period = seconds_text(answer.solution.period_s);
  const bool by_latency = answer.options.objective == Objective::kLatency;
  switch (why.kind) {
    case Kind::kMemory:
      return "its " + megabytes_text(why.free_bytes) + " MB hold no layer with its buffers; the smallest needs " +
             megabytes_text(why.needed_bytes) + " MB";
    case Kind::kNoBandwidth: return "it has no bandwidth";
    case Kind::kSlow:
      return "too slow: its fastest layer computes " + seconds_text(why.seconds) + ", the bottleneck is " + period;
    case Kind::kSlowLink:
      return "its link is too slow: the smallest cut takes " + seconds_text(why.seconds) + ", the bottleneck is " +
             period;
    case Kind::kNotNeeded:
      return by_energy(answer) ? std::string("not needed: no schedule with it takes less energy")
             : by_latency      ? std::string("not needed: no schedule with it has a lower latency")
                               : "not needed: no schedule with it passes the bottleneck of " + period;
    case Kind::kUndecided: break;
  }
  return "no better schedule with it was found within the time limit";
}

// Hosts without a stage, those that the problem does not have last.
std::vector<yaml::LeftOut> unused_hosts(const Answer& answer) {
  std::vector<yaml::LeftOut> hosts;
  for (const Unused& one : answer.unused) {
    hosts.push_back({host_name(answer, one.host), type_name(answer, one.host), why_text(answer, one.why)});
  }
  hosts.insert(hosts.end(), answer.named.left_out.begin(), answer.named.left_out.end());
  return hosts;
}

// Hosts that have the same text share a line, with their type if it is the same.
std::string grouped(const char* title, const std::vector<yaml::LeftOut>& hosts) {
  std::string text;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const std::string& why = hosts[i].why;
    const auto same_why = [&](const yaml::LeftOut& host) { return host.why == why; };
    if (std::any_of(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(i), same_why)) continue;
    std::vector<std::string> names;
    bool one_type = true;
    for (const yaml::LeftOut& host : hosts) {
      if (!same_why(host)) continue;
      names.push_back(yaml::printable(host.host));
      one_type = one_type && host.type == hosts[i].type;
    }
    text += title + yaml::listing(names, names.size()) + (one_type ? " (" + yaml::printable(hosts[i].type) + ")" : "") +
            ": " + why + "\n";
  }
  return text;
}

// The stages with their costs, a row each.
std::string stage_table(const Answer& answer, std::size_t room) {
  using Align = Table::Align;
  const bool data = problem_of(answer).data_host >= 0;
  const bool joint = answer.named.joint;
  std::vector<Align> columns(joint ? 12 : 10, Align::kRight);
  std::fill(columns.begin() + 1, columns.begin() + (joint ? 5 : 4), Align::kLeft);
  Table table(columns,
              joint ? std::vector<std::size_t>{11, 6, 9, 2, 10, 7, 4, 8} : std::vector<std::size_t>{9, 5, 7, 2, 8, 6});
  std::vector<std::string> head{"stage", "host", "type", "layers"};
  if (joint) head.push_back("dtype");
  head.insert(head.end(), {"compute, s", "link in, s", "link out, s", "bits out"});
  if (joint) head.push_back("loss");
  head.insert(head.end(), {"memory, MB", "slack, s"});
  table.row(head);
  for (std::size_t s = 0; s < answer.solution.stages.size(); ++s) {
    const Stage& stage = answer.solution.stages[s];
    const StageCost& cost = answer.costs.stages[s];
    const int bits = bits_behind(answer, s);
    std::vector<std::string> row{std::to_string(s), yaml::printable(host_name(answer, stage.host)),
                                 yaml::printable(type_of(answer, stage).name),
                                 std::to_string(stage.first + 1) + "-" + std::to_string(stage.last)};
    if (joint) row.push_back(dtype_of(answer, stage));
    row.push_back(microseconds_text(cost.busy_s()));
    row.push_back(s > 0 || data ? microseconds_text(cost.link_in_s) : "-");
    row.push_back(!is_last(answer, s) || data ? microseconds_text(cost.link_out_s) : "-");
    row.push_back(bits != 0 ? std::to_string(bits) : "-");
    if (joint) row.push_back(answer.named.losses_known() ? figure_text(cost.loss + cost.link_loss) : "-");
    row.push_back(megabytes_text(cost.mem_bytes) + " of " + megabytes_text(cost.mem_available_bytes));
    row.push_back(microseconds_text(answer.solution.period_s / waiting_of(answer) - cost.worst_s()));
    table.row(row);
  }
  return table.text(room);
}

std::string data_host_line(const Answer& answer) {
  const std::vector<Stage>& stages = answer.solution.stages;
  const int data_host = problem_of(answer).data_host;
  const auto stage =
      std::find_if(stages.begin(), stages.end(), [&](const Stage& one) { return one.host == data_host; });
  const Costs& costs = answer.costs;
  return "data host    " + yaml::printable(host_name(answer, data_host)) +
         (costs.feeding_s + costs.collecting_s > 0
              ? ": feeding takes " + seconds_text(costs.feeding_s) + ", collecting " + seconds_text(costs.collecting_s)
              : std::string(": its profile does not say what feeding and collecting take")) +
         (stage == stages.end() ? std::string("; no stage is there")
                                : "; it runs stage " + std::to_string(stage - stages.begin())) +
         "\n";
}

// "3.21 J an item: pi1 1.2, desk 2.01".
std::string energy_words(const Answer& answer) {
  const std::vector<Stage>& stages = answer.solution.stages;
  std::vector<std::string> parts;
  double rest = *answer.costs.joules;
  const double size = answer.solution.batch_size;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const double joules = *answer.costs.stages[s].joules;
    parts.push_back(yaml::printable(host_name(answer, stages[s].host)) + " " + figure_text(joules / size));
    rest -= joules;
  }
  const int data_host = problem_of(answer).data_host;
  const auto on_data = [&](const Stage& stage) { return stage.host == data_host; };
  if (data_host >= 0 && std::none_of(stages.begin(), stages.end(), on_data)) {
    parts.push_back("the data host " + figure_text(rest / size));
  }
  return energy_text(*answer.costs.joules / size) + ": " + yaml::listing(parts, parts.size());
}

// Lines about the texts of a decoder.
std::string text_lines(const Answer& answer) {
  const yaml::Texts& texts = *answer.named.texts;
  const TextFigures figures = text_figures(answer);
  std::vector<std::string> caches;
  for (const StageCost& cost : answer.costs.stages) caches.push_back(megabytes_text(cost.state_bytes) + " MB");
  std::string end = "\n";
  if (figures.waiting > 1) {
    end = ", of which groups wait " + percent_text(1 - 1 / figures.waiting) + " for slow steps\n";
  }
  return "streams      " + figure_text(texts.streams) + " in " +
         yaml::plural(static_cast<std::size_t>(figures.groups + 0.5), "group") + "; contexts of up to " +
         figure_text(texts.context) + " tokens take " + yaml::listing(caches, caches.size()) + "\n" + "throughput   " +
         figure_text(figures.tokens_per_s) + " tokens/s of all streams, " +
         seconds_text(texts.streams / figures.tokens_per_s) + " between two tokens of a stream" + end +
         "latency      " + seconds_text(figures.token_s) + " for a token of a lone stream\n" + "first token  " +
         seconds_text(figures.first_token_s) + " after a prompt of " + figure_text(texts.prompt) +
         " tokens, in chunks of " + figure_text(figures.chunk) + "\n";
}

std::string bits_words(int bits) { return bits == 0 ? "uncompressed" : std::to_string(bits) + " bits"; }

// What was chosen, and what is the next best instead.
std::pair<std::string, std::string> choice_words(const Answer& answer, const NextBest& next) {
  using Choice = NextBest::Choice;
  const Problem& problem = problem_of(answer);
  const std::string stage = std::to_string(next.stage);
  std::string instead;
  switch (next.choice) {
    case Choice::kBatchSize:
      if (next.feasible) instead = figure_text(next.batch_size);
      return {"microbatches of " + figure_text(answer.solution.batch_size), instead};
    case Choice::kDtype: return {"number type " + next.dtype, next.feasible ? "without it" : ""};
    case Choice::kStageDtype:
      if (next.feasible) instead = problem.setting(next.instead).dtype;
      return {"stage " + stage + " in " + next.dtype, instead};
    case Choice::kLinkBits:
      if (next.feasible) instead = bits_words(problem.widths[at(next.instead)].bits);
      return {"link after stage " + stage + ": " + bits_words(bits_behind(answer, at(next.stage))), instead};
    case Choice::kHost: break;
  }
  return {"host " + yaml::printable(host_name(answer, next.host)), next.feasible ? "without it" : ""};
}

std::string next_best_line(const Answer& answer, const NextBest& next) {
  const auto [choice, instead] = choice_words(answer, next);
  if (!next.feasible)
    return choice + (next.planned_anew() ? "; no plan without it" : "; nothing else keeps the limits");
  const bool rate = answer.options.objective == Objective::kThroughput;
  const double today = answer.solution.objective;
  return choice + "; next best: " + instead + (next.planned_anew() ? "" : ", all else as it is") + ": " +
         objective_text(answer, next.objective) + ratio_text(rate ? today / next.objective : next.objective / today) +
         (answer.named.losses_known() ? ", agreement " + agreement_text(answer, next.loss) : "");
}

std::string loss_why(const Answer& answer, const LossOfHost& one) {
  if (one.loss.of_data_host) return "it reads the inputs and collects the outputs";
  return one.why ? why_text(answer, *one.why, problem_of(answer).hosts.size() - 1) : undecided_text();
}

// "after a pause of 1.2 s (0.4 s of it to load layers; 2.1 s in all if no cache is kept, 0.8 s with --keep-outputs,
// 0.3 s with --replicate)".
std::string pause_words(const Pause& pause) {
  return "after a pause of " + seconds_text(pause.seconds(pause.kept_s)) + " (" + seconds_text(pause.load_s) +
         " of it to load layers; " + seconds_text(pause.seconds(pause.all_s)) + " in all if no cache is kept, " +
         seconds_text(pause.seconds(pause.outputs_s)) + " with --keep-outputs, " + seconds_text(pause.with_copies_s()) +
         " with --replicate)";
}

std::string effect_text(const Answer& answer, const LossOfHost& one) {
  switch (one.loss.effect) {
    case Loss::Effect::kNone: return "nothing changes, no stage is there";
    case Loss::Effect::kEnds: return "ends the run: " + loss_why(answer, one);
    case Loss::Effect::kUnknown: return "undecided: " + loss_why(answer, one);
    case Loss::Effect::kContinues: break;
  }
  const Solution& after = one.loss.after;
  const double ratio = after.items_per_s() / answer.solution.items_per_s();
  return rate_words(answer, after.items_per_s()) +
         (std::isfinite(ratio) ? ", " + percent_text(ratio) + " of now" : "") +
         (answer.options.objective == Objective::kLatency ? ", at a latency of " + seconds_text(after.latency_s) : "") +
         (after.status == Status::kOptimal ? "" : ", " + quality_text(after)) +
         (one.loss.pause ? ", " + pause_words(*one.loss.pause) : "");
}

const char* effect_name(Loss::Effect effect) {
  switch (effect) {
    case Loss::Effect::kNone: return "none";
    case Loss::Effect::kContinues: return "continues";
    case Loss::Effect::kEnds: return "ends";
    case Loss::Effect::kUnknown: break;
  }
  return "unknown";
}

const char* status_name(const Answer& answer, const Solution& solution) {
  return answer.given ? "given" : solution.status == Status::kOptimal ? "optimal" : "bounded";
}

void write_stage(JsonWriter& json, const Answer& answer, std::size_t s) {
  const Stage& stage = answer.solution.stages[s];
  const StageCost& cost = answer.costs.stages[s];
  const ProfileNotes& notes = type_of(answer, stage).notes;
  json.open('{');
  json.key("stage").value(static_cast<int>(s));
  json.key("host").value(host_name(answer, stage.host));
  json.key("type").value(type_of(answer, stage).name);
  json.key("layers").pair(stage.first + 1, stage.last);
  json.key("dtype").value(dtype_of(answer, stage));
  json.key("quant_bits").value(bits_behind(answer, s));
  json.key("compute_s").value(cost.compute_s);
  json.key("receive_s").value(cost.receive_s);
  json.key("send_s").value(cost.send_s);
  json.key("data_s").value(cost.data_s);
  json.key("link_in_s").value(cost.link_in_s);
  json.key("link_in_latency_s").value(cost.link_in_latency_s);
  json.key("link_out_s").value(cost.link_out_s);
  json.key("link_out_latency_s").value(cost.link_out_latency_s);
  json.key("output_bytes").value(cost.output_bytes);
  json.key("sent_bytes").value(cost.sent_bytes);
  json.key("loss").value(cost.loss);
  json.key("link_loss").value(cost.link_loss);
  if (cost.joules) json.key("joules").value(*cost.joules);
  json.key("mem_bytes").value(cost.mem_bytes);
  if (cost.state_bytes > 0) json.key("state_bytes").value(cost.state_bytes);
  json.key("activation_bytes").value(cost.activation_bytes);
  json.key("buffer_bytes").value(cost.buffer_bytes);
  if (answer.before.known()) {
    json.key("beside_bytes").value(cost.beside_bytes);
    json.key("load_bytes").value(cost.load_bytes);
  }
  json.key("mem_available_bytes").value(cost.mem_available_bytes);
  json.key("slack_s").value(answer.solution.period_s / waiting_of(answer) - cost.worst_s());
  if (notes.threads > 0) json.key("threads").value(notes.threads);
  if (!notes.kernels.empty()) json.key("kernels").value(notes.kernels);
  json.key("tokens").numbers(notes.tokens);
  json.close('}');
}

void write_bottleneck(JsonWriter& json, const Answer& answer) {
  const Bottleneck worst = find_bottleneck(answer);
  const auto stage_or_data = [&](const char* key, int stage) {
    json.key(key);
    stage == Bottleneck::kDataHost ? json.value("data host") : json.value(stage);
  };
  json.key("bottleneck").open('{');
  json.key("kind").value(worst.kind);
  stage_or_data("stage", worst.stage);
  if (worst.kind == std::string("link")) stage_or_data("to_stage", worst.to);
  json.key("seconds").value(worst.seconds);
  json.key("words").value(bottleneck_words(answer));
  json.close('}');
}

void write_what_if(JsonWriter& json, const Answer& answer, const WhatIf& one) {
  const bool feasible = !one.solution.stages.empty();
  json.open('{');
  json.key("change").value(one.text);
  json.key("feasible").value(feasible);
  if (feasible) {
    json.key("status").value(status_name(answer, one.solution));
    json.key("bottleneck_s").value(one.solution.period_s);
    json.key("throughput_items_per_s").value(one.solution.items_per_s());
    json.key("latency_s").value(one.solution.latency_s);
    json.key("lower_bound_s").value(reported(answer, one.solution.lower_bound, one.solution));
    json.key("gap").value(one.solution.gap());
  } else {
    json.key("why").value(one.why ? why_text(answer, *one.why, problem_of(answer).hosts.size()) : undecided_text());
  }
  json.close('}');
}

void write_loss(JsonWriter& json, const Answer& answer, const LossOfHost& one) {
  const Loss& loss = one.loss;
  json.open('{');
  json.key("host").value(host_name(answer, loss.host));
  json.key("type").value(type_name(answer, loss.host));
  json.key("effect").value(effect_name(loss.effect));
  if (loss.effect == Loss::Effect::kContinues) {
    json.key("bottleneck_s").value(loss.after.period_s);
    json.key("throughput_items_per_s").value(loss.after.items_per_s());
    json.key("throughput_ratio").value(loss.after.items_per_s() / answer.solution.items_per_s());
    json.key("latency_s").value(loss.after.latency_s);
    json.key("gap").value(loss.after.gap());
    json.key("stages").open('[');
    for (const Stage& stage : loss.after.stages) {
      const int host = stage.host < loss.host ? stage.host : stage.host + 1;  // it is left out of this plan
      json.open('{').key("host").value(host_name(answer, host));
      json.key("layers").pair(stage.first + 1, stage.last);
      json.key("dtype").value(problem_of(answer).setting(stage.setting).dtype);
      json.key("quant_bits")
          .value(stage.last == problem_of(answer).layers()
                     ? 0
                     : problem_of(answer).widths[static_cast<std::size_t>(stage.width)].bits)
          .close('}');
    }
    json.close(']');
    if (loss.pause) {
      json.key("pause_s").value(loss.pause->seconds(loss.pause->kept_s));
      json.key("pause_without_cache_s").value(loss.pause->seconds(loss.pause->all_s));
      json.key("pause_with_outputs_s").value(loss.pause->seconds(loss.pause->outputs_s));
      json.key("pause_with_copies_s").value(loss.pause->with_copies_s());
      json.key("load_s").value(loss.pause->load_s);
    }
  } else if (loss.effect != Loss::Effect::kNone) {
    json.key("why").value(loss_why(answer, one));
  }
  json.close('}');
}

void write_next_best(JsonWriter& json, const Answer& answer, const NextBest& next) {
  const auto [choice, instead] = choice_words(answer, next);
  json.open('{').key("choice").value(choice).key("instead").value(instead).key("feasible").value(next.feasible);
  json.key(by_energy(answer) ? "objective_j" : "objective_s").value(next.objective);
  json.key("loss").value(next.loss).key("planned_anew").value(next.planned_anew()).close('}');
}

void write_text(JsonWriter& json, const Answer& answer) {
  const yaml::Texts& texts = *answer.named.texts;
  const TextFigures figures = text_figures(answer);
  json.key("text").open('{');
  json.key("streams").value(texts.streams);
  json.key("groups").value(figures.groups);
  json.key("context").value(texts.context);
  json.key("prompt_tokens").value(texts.prompt);
  json.key("answer_tokens").value(texts.answer);
  json.key("chunk").value(figures.chunk);
  json.key("tokens_per_s").value(figures.tokens_per_s);
  json.key("between_tokens_s").value(texts.streams / figures.tokens_per_s);
  json.key("token_s").value(figures.token_s);
  json.key("first_token_s").value(figures.first_token_s);
  json.close('}');
}

void write_moments(JsonWriter& json, const Answer& answer) {
  if (answer.moments.empty()) return;
  json.key("moments").open('[');
  for (const Moment& moment : answer.moments) {
    const Costs& costs = moment.costs;
    json.open('{').key("batch_size").value(moment.batch_size);
    json.key("bottleneck_s").value(costs.period_s).key("latency_s").value(costs.latency_s);
    if (costs.joules) json.key("joules_per_item").value(*costs.joules / moment.batch_size);
    json.close('}');
  }
  json.close(']');
}

void write_report(JsonWriter& json, const Answer& answer) {
  const Solution& solution = answer.solution;
  const bool energy = by_energy(answer);
  json.open('{');
  json.key("model").value(answer.named.model);
  json.key("layers").value(problem_of(answer).layers());
  json.key("batch_size").value(solution.batch_size);
  if (!answer.named.joint) json.key("dtype").value(answer.named.dtype);
  json.key("objective").value(objective_name(answer));
  json.key("status").value(status_name(answer, solution));
  json.key("schedule").open('[');
  for (std::size_t s = 0; s < solution.stages.size(); ++s) write_stage(json, answer, s);
  json.close(']');
  write_bottleneck(json, answer);
  json.key("feed_s").value(answer.costs.feeding_s);
  json.key("collect_s").value(answer.costs.collecting_s);
  json.key("bottleneck_s").value(solution.period_s);
  json.key("throughput_items_per_s").value(solution.items_per_s());
  json.key("latency_s").value(solution.latency_s);
  if (answer.named.texts) write_text(json, answer);
  json.key("loss").value(solution.loss);
  json.key("max_loss").value(problem_of(answer).max_loss);
  json.key("losses_known").value(answer.named.losses_known());
  if (answer.costs.joules) json.key("joules_per_item").value(*answer.costs.joules / solution.batch_size);
  if (answer.given) {
    json.key("fits").value(answer.costs.fits());
    write_moments(json, answer);
  } else {
    json.key(energy ? "objective_j" : "objective_s").value(reported(answer, solution.objective, solution));
    json.key(energy ? "lower_bound_j" : "lower_bound_s").value(reported(answer, solution.lower_bound, solution));
    json.key("gap").value(solution.gap());
    if (solution.fewest_stages > 0) json.key("fewest_stages").value(solution.fewest_stages);
    json.key("elapsed_s").value(solution.elapsed_s);
  }
  write_left_out(json, "unused_hosts", unused_hosts(answer));
  write_texts(json, "warnings", answer.named.warnings);
  json.key("what_if").open('[');
  for (const WhatIf& one : answer.what_ifs) write_what_if(json, answer, one);
  json.close(']');
  if (answer.losses) {
    json.key("losses").open('[');
    for (const LossOfHost& one : *answer.losses) write_loss(json, answer, one);
    json.close(']');
  }
  json.key("next_best").open('[');
  for (const NextBest& next : answer.next_best) write_next_best(json, answer, next);
  json.close(']');
  json.close('}');
}

}  // namespace

std::string schedule_yaml(const Answer& answer) {
  std::string text;
  if (answer.named.joint) {
    const std::string size = figure_text(answer.solution.batch_size);
    if (!answer.named.texts) text = "# microbatches of " + size + ": pipeedge run -u " + size + "\n";
  }
  for (std::size_t s = 0; s < answer.solution.stages.size(); ++s) {
    const Stage& stage = answer.solution.stages[s];
    text += "- " + yaml_name(host_name(answer, stage.host)) + ": [" + std::to_string(stage.first + 1) + ", " +
            std::to_string(stage.last) + "]\n";
    const int bits = bits_behind(answer, s);
    if (bits != 0) text += "  quant_bits: " + std::to_string(bits) + "\n";
    const std::string& dtype = dtype_of(answer, stage);
    if (answer.named.joint && dtype != "float32" && !dtype.empty()) text += "  dtype: " + dtype + "\n";
  }
  return text;
}

std::string in_one_line(const std::string& schedule) {
  std::string text;
  std::istringstream lines(schedule);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 2, "- ") == 0) text += (text.empty() ? "" : ", ") + line.substr(2);
    if (line.compare(0, 2, "  ") == 0) text += line.substr(1);
  }
  return text;
}

std::string throughput_text(const Answer& answer) { return rate_words(answer, answer.solution.items_per_s()); }

std::string explanation(const Answer& answer, std::size_t room) {
  const Problem& problem = problem_of(answer);
  const Solution& solution = answer.solution;
  const bool joint = answer.named.joint;
  const std::string how = answer.given ? "as given" : std::string("for ") + objective_name(answer);
  std::string text = yaml::printable(answer.named.model) + ": " + std::to_string(problem.layers()) +
                     (problem.layers() == 1 ? " layer" : " layers");
  text += joint ? (answer.given ? ", " : ", planned jointly ") + how + "\n"
                : (answer.named.texts
                       ? std::string(", steps of ") + figure_text(solution.batch_size) +
                             (solution.batch_size == 1 ? " token, " : " tokens, ")
                       : ", microbatches of " + std::to_string(static_cast<long long>(solution.batch_size)) + ", ") +
                      answer.named.dtype + ", " + how + "\n";
  text += stage_table(answer, room);
  if (joint && !answer.named.texts) text += "microbatch   " + figure_text(solution.batch_size) + " items\n";
  if (problem.data_host >= 0) text += data_host_line(answer);
  text += "bottleneck   " + bottleneck_words(answer) + "\n";
  if (answer.named.texts) {
    text += text_lines(answer);
  } else {
    text += "throughput   " + rate_words(answer, solution.items_per_s()) + "\n";
    text += "latency      " + seconds_text(solution.latency_s) + " for one microbatch through the idle pipeline\n";
  }
  if (joint) {
    text += "agreement    " + agreement_text(answer, solution.loss) + " expected" +
            (answer.named.losses_known() ? ", at least " + figure_text(1 - problem.max_loss) + " wanted" : "") + "\n";
  }
  if (answer.costs.joules) text += "energy       " + energy_words(answer) + "\n";
  if (answer.given) return text + (answer.costs.fits() ? "" : "memory       not enough: a stage does not fit\n");
  text += "lower bound  " + bound_text(answer) + ", gap " + percent_text(solution.gap()) + ": " +
          quality_text(solution) + "\n";
  const auto stages = static_cast<int>(solution.stages.size());
  if (solution.fewest_stages > 0 && solution.fewest_stages < stages) {
    text += "hosts        " + std::to_string(stages) + " used, " + std::to_string(solution.fewest_stages) +
            " at the least for that throughput: the search for fewer was limited\n";
  }
  text += "time spent   " + seconds_text(solution.elapsed_s) + "\n";
  for (const NextBest& next : answer.next_best) text += "chosen       " + next_best_line(answer, next) + "\n";
  return text + grouped("unused       ", unused_hosts(answer));
}

std::string losses_text(const Answer& answer) {
  std::vector<yaml::LeftOut> lines;
  for (const LossOfHost& one : *answer.losses) {
    lines.push_back({host_name(answer, one.loss.host), type_name(answer, one.loss.host), effect_text(answer, one)});
  }
  return grouped("loss of      ", lines);
}

std::string what_if_line(const Answer& answer, const WhatIf& what_if) {
  const bool latency = answer.options.objective == Objective::kLatency;
  const auto figure = [&](const Solution& solution) {
    return rate_words(answer, solution.items_per_s()) +
           (latency ? " at a latency of " + seconds_text(solution.latency_s) : std::string());
  };
  const Solution& today = answer.solution;
  const Solution& then = what_if.solution;
  const bool feasible = !then.stages.empty();
  std::string line = "what if " + yaml::printable(what_if.text, 400) + ": ";
  line += feasible ? figure(then) : "no feasible schedule";
  line += ", today " + (answer.found() ? figure(today) : std::string("none"));
  if (feasible && answer.found()) {
    line += ratio_text(latency ? then.latency_s / today.latency_s : then.items_per_s() / today.items_per_s());
    if (then.status != Status::kOptimal) line += ", " + quality_text(then);
  }
  if (feasible) return line;
  return line + ": " +
         (what_if.why ? why_text(answer, *what_if.why, problem_of(answer).hosts.size()) : undecided_text());
}

std::string report_json(const Answer& answer) {
  JsonWriter json;
  write_report(json, answer);
  return json.text();
}

std::string reports_json(const std::vector<Answer>& answers) {
  JsonWriter json;
  json.open('{').key("plans").open('[');
  for (const Answer& answer : answers) write_report(json, answer);
  json.close(']').close('}');
  return json.text();
}

std::string stopped_line(const Answer& answer) {
  const Solution& solution = answer.solution;
  const double bound = reported(answer, solution.lower_bound, solution);
  return "stopped after " + seconds_text(solution.elapsed_s) + ": gap " + percent_text(solution.gap()) +
         ", the optimum is not below " + (by_energy(answer) ? energy_text(bound) : seconds_text(bound));
}

std::string refusal(const Answer& answer) {
  const std::string what = answer.named.joint ? "plan" : "schedule";
  if (const LossOfHost* fatal = answer.fatal()) {
    const bool ends = fatal->loss.effect == Loss::Effect::kEnds;
    return (ends ? "no " + what + " survives the loss of any one host: "
                 : std::string("it is undecided whether the loss of any one host can be taken: ")) +
           "without " + yaml::printable(host_name(answer, fatal->loss.host)) + ", " + loss_why(answer, *fatal) +
           (ends ? "" : "; raise --time-limit");
  }
  if (answer.why) return "no feasible " + what + ": " + why_text(answer, *answer.why, problem_of(answer).hosts.size());
  return "no " + what + " was found within the time limit of " + seconds_text(answer.options.time_limit_s) +
         ", and none could be ruled out; raise --time-limit";
}

std::string no_schedule_json(const Answer& answer) {
  const LossOfHost* const fatal = answer.fatal();
  const Status status = fatal != nullptr ? fatal->loss.after.status : answer.solution.status;
  JsonWriter json;
  json.open('{').key("status").value(status == Status::kInfeasible ? "infeasible" : "unknown").close('}');
  return json.text();
}

}  // namespace pipeedge::cli
