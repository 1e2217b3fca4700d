#include "losses.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

#include "../core/instance.hpp"
#include "../yaml/wording.hpp"
#include "report.hpp"

namespace pipeedge::cli {
namespace {

const Host& host_of(const Problem& problem, const Loss& loss) {
  return problem.hosts[static_cast<std::size_t>(loss.host)];
}

const std::string& type_name(const Problem& problem, const Loss& loss) {
  return problem.types[static_cast<std::size_t>(host_of(problem, loss).type)].name;
}

Loss::Effect effect_of(const WhatIf& after) {
  if (after.feasible) return Loss::Effect::kContinues;
  return after.solution.status == Status::kUnknown ? Loss::Effect::kUnknown : Loss::Effect::kEnds;
}

std::string effect_text(const Loss& loss, Objective objective, double items_per_s) {
  switch (loss.effect) {
    case Loss::Effect::kNone: return "nothing changes, no stage is there";
    case Loss::Effect::kEnds: return "ends the run: " + loss.after.why;
    case Loss::Effect::kUnknown: return "undecided: " + loss.after.why;
    case Loss::Effect::kContinues: break;
  }
  const double ratio = loss.after.items_per_s / items_per_s;
  return rate_text(loss.after.items_per_s) + (std::isfinite(ratio) ? ", " + percent_text(ratio) + " of now" : "") +
         (objective == Objective::kLatency ? ", at a latency of " + seconds_text(loss.after.solution.latency_s) : "") +
         (loss.after.solution.status == Status::kOptimal ? "" : ", " + quality_text(loss.after.solution));
}

const char* effect_name(Loss::Effect effect) {
  switch (effect) {
    case Loss::Effect::kNone: return "none";
    case Loss::Effect::kContinues: return "continues";
    case Loss::Effect::kEnds: return "ends";
    case Loss::Effect::kUnknown: return "unknown";
  }
  return "";
}

}  // namespace

std::vector<Loss> find_losses(const Problem& problem, const Solution& now, const Answer& answer) {
  const Instance instance(problem);
  std::vector<Loss> losses(problem.hosts.size());
  std::vector<char> used(problem.hosts.size(), 0);
  for (const Stage& stage : now.stages) used[static_cast<std::size_t>(stage.host)] = 1;
  for (int cls = 0; cls < instance.classes(); ++cls) {
    std::optional<WhatIf> after;       // without one host of the class
    for (const int host : instance.hosts(cls)) {
      Loss& loss = losses[static_cast<std::size_t>(host)];
      loss.host = host;
      loss.of_data_host = host == problem.data_host;
      if (loss.of_data_host) {
        loss.effect = Loss::Effect::kEnds;
        loss.after.why = "it reads the inputs and collects the outputs";
      } else if (used[static_cast<std::size_t>(host)] != 0) {
        if (!after) after = answer(without_host(problem, host));
        loss.after = *after;
        loss.effect = effect_of(*after);
      }
    }
  }
  return losses;
}

const Loss* first_fatal(const std::vector<Loss>& losses) {
  for (const Loss::Effect effect : {Loss::Effect::kEnds, Loss::Effect::kUnknown}) {
    const auto found = std::find_if(losses.begin(), losses.end(), [&](const Loss& loss) {
      return loss.effect == effect && !loss.of_data_host;
    });
    if (found != losses.end()) return &*found;
  }
  return nullptr;
}

std::string fatal_text(const Problem& problem, const Loss& loss) {
  return "without " + yaml::printable(host_of(problem, loss).name) + ", " + loss.after.why;
}

std::string losses_text(const Problem& problem, const std::vector<Loss>& losses, Objective objective,
                        double items_per_s) {
  // Hosts whose loss has the same effect share a line.
  std::vector<std::string> effects;
  for (const Loss& loss : losses) effects.push_back(effect_text(loss, objective, items_per_s));
  std::string text;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const auto before = effects.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find(effects.begin(), before, effects[i]) != before) continue;
    std::vector<std::string> names;
    bool one_type = true;
    for (std::size_t j = i; j < losses.size(); ++j) {
      if (effects[j] != effects[i]) continue;
      names.push_back(yaml::printable(host_of(problem, losses[j]).name));
      one_type = one_type && type_name(problem, losses[j]) == type_name(problem, losses[i]);
    }
    const std::string type = one_type ? " (" + yaml::printable(type_name(problem, losses[i])) + ")" : "";
    text += "loss of      " + yaml::listing(names, names.size()) + type + ": " + effects[i] + "\n";
  }
  return text;
}

void write_losses(JsonWriter& json, const Problem& problem, const std::vector<Loss>& losses, double items_per_s) {
  json.key("losses").open('[');
  for (const Loss& loss : losses) {
    json.open('{');
    json.key("host").value(host_of(problem, loss).name);
    json.key("type").value(type_name(problem, loss));
    json.key("effect").value(effect_name(loss.effect));
    if (loss.effect == Loss::Effect::kContinues) {
      const Solution& solution = loss.after.solution;
      json.key("bottleneck_s").value(solution.bottleneck_s);
      json.key("throughput_items_per_s").value(loss.after.items_per_s);
      json.key("throughput_ratio").value(loss.after.items_per_s / items_per_s);
      json.key("latency_s").value(solution.latency_s);
      json.key("gap").value(solution.gap());
    } else if (loss.effect != Loss::Effect::kNone) {
      json.key("why").value(loss.after.why);
    }
    json.close('}');
  }
  json.close(']');
}

}  // namespace pipeedge::cli
